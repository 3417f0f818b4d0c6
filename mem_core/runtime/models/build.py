"""Build, name and export models. Worker side: the functions import torch and transformers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mem_core.domain.errors import InternalError, RequestError
from mem_core.domain.request import ModelSection
from mem_core.infrastructure.storage.appearing import appearing
from mem_core.infrastructure.storage.reading import copy_regular
from mem_core.runtime.models.configuration import refused
from mem_core.runtime.models.encoding import tokenizer_files
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.folders import is_preset, local_model_folder
from mem_core.runtime.models.presets import PRESETS, preset_name
from mem_core.runtime.ranks.worker.classify import memory_kind

if TYPE_CHECKING:
    import torch

GENERATION_NAME = "generation_config.json"
_DTYPES = ("float32", "bfloat16", "float16")


def build_model(
    model: ModelSection,
    sequence_length: int,
    seed: int,
    dtype: str,
    activation_checkpointing: bool,
    cache_dir: Path | None = None,
) -> "torch.nn.Module":
    """A causal language model in training mode on the CPU, no key-value cache. Which of its weights train is for the caller to mark.

    A preset's weights are drawn in float32 from `seed` and are the same bits on every call and rank; a folder's come from its
    safetensors. `dtype` is float32, bfloat16 or float16. Torch's global random state is left as it was.

    Raises:
        RequestError: the model cannot be used as asked, or `sequence_length` is beyond its positions.
    """
    _check(model, sequence_length, dtype, cache_dir)
    module = _preset_model(model.source, seed) if is_preset(model.source) else _folder_model(model.source, dtype, cache_dir)
    return _ready(module, dtype, activation_checkpointing)


def attention_of(config: Any) -> str:
    """How attention is computed: torch's fused kernel where the architecture offers it, else plain operations ("eager"), which give the
    same model with more memory."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "sdpa" if architecture is None or getattr(architecture, "_supports_sdpa", True) else "eager"


def build_skeleton(source: str, cache_dir: Path | None = None) -> "torch.nn.Module":
    """The model without weights, on the device "meta": what building it says about it costs neither memory nor time.

    Raises:
        RequestError: transformers cannot make a causal language model of the folder's config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(source, cache_dir)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config))
    except Exception as exc:  # whatever transformers makes of other people's files
        raise _unusable("the model cannot be built", exc, source, "Give a causal language model that transformers knows by itself") from exc


def random_model(config: Any) -> "torch.nn.Module":
    """A model of a configuration with weights from one seed, in float32 and in evaluation mode; torch's random state is left as it was."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config)).float().eval()


def load_tokenizer(source: str, cache_dir: Path | None = None) -> Any:
    """The model's Hugging Face tokenizer; bytes for presets. Code of the model's own is never run.

    Raises:
        RequestError: the folder holds no tokenizer that can be loaded.
    """
    if is_preset(source):
        from transformers import ByT5Tokenizer

        return ByT5Tokenizer()
    from transformers import AutoTokenizer

    folder = local_model_folder(source, cache_dir).absolute()  # transformers compares the text of a path with names on the hub
    if not tokenizer_files(folder, chat=False):
        raise RequestError("the folder has no tokenizer files", field="model.source", value=source, remedy="Add tokenizer.json and its kin")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as exc:  # whatever transformers and its kin make of other people's files
        raise _unusable("the tokenizer cannot be loaded", exc, source, "Add complete tokenizer files") from exc


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes that DeepSpeed, DDP and torch.compile add."""
    while name.startswith("module."):
        name = name.removeprefix("module.").removeprefix("_orig_mod.")
    return name.replace("_orig_mod.", "")


def parameter_names(module: "torch.nn.Module") -> dict[str, tuple[int, ...]]:
    """Name -> full shape of each trained parameter: tied weights once, in name order, wrapper prefixes removed.

    Parameters that ZeRO-3 has partitioned report the whole shape.
    """
    shapes = {
        clean_name(name): tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    return dict(sorted(shapes.items()))


def save_pretrained_folder(
    model: ModelSection,
    state_dict: Mapping[str, "torch.Tensor"],
    folder: Path,
    cache_dir: Path | None = None,
    finish: Callable[[Path], None] = lambda staging: None,
) -> None:
    """Write a Hugging Face folder (config, safetensors, tokenizer) that `AutoModelForCausalLM.from_pretrained` loads.

    `state_dict` holds each trained parameter under its clean name, tied weights once. The folder appears whole or not at all,
    and replaces an older one; exports of single steps that lie in it stay. `finish` may add files before it appears.

    Raises:
        InternalError: names or shapes are not the model's.
    """
    from huggingface_hub import save_torch_state_dict

    config = config_of(model.source, cache_dir)
    skeleton = build_skeleton(model.source, cache_dir)
    _check_state(parameter_names(skeleton), state_dict)
    config.architectures = [type(skeleton).__name__]
    config.dtype = next(iter(state_dict.values())).dtype
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state_dict.items()}
    with appearing(folder) as staging:
        save_torch_state_dict(tensors, staging, metadata={"format": "pt"})
        config.save_pretrained(staging)
        write_tokenizer(model.source, staging, cache_dir)
        finish(staging)


def write_tokenizer(source: str, target: Path, cache_dir: Path | None = None) -> None:
    """The folder's own files byte for byte: what a loaded tokenizer would write is what its class makes of them, which may differ."""
    if is_preset(source):
        load_tokenizer(source).save_pretrained(target)
        return
    folder = local_model_folder(source, cache_dir)
    for name in tokenizer_files(folder):
        (target / name).parent.mkdir(exist_ok=True)
        copy_regular(folder / name, target / name)
    if (folder / GENERATION_NAME).is_file():
        copy_regular(folder / GENERATION_NAME, target / GENERATION_NAME)


def _check(model: ModelSection, sequence_length: int, dtype: str, cache_dir: Path | None) -> None:
    if dtype not in _DTYPES:
        raise RequestError("unknown number format", field="model.dtype", value=dtype, bound=", ".join(_DTYPES), remedy="Use one of these")
    positions = describe_model(model.source, cache_dir).max_positions
    if positions is not None and sequence_length > positions:
        raise RequestError(
            f"{model.source} takes sequences of at most {positions} tokens",
            field="data.sequence_length",
            value=sequence_length,
            bound=f"2 to {positions}",
            remedy=f"Set data.sequence_length to {positions} or less, or take another model",
        )


def config_of(source: str, cache_dir: Path | None = None) -> Any:
    """The configuration as transformers reads it. Raises RequestError: it cannot."""
    if is_preset(source):
        from transformers import LlamaConfig

        return LlamaConfig(**PRESETS[str(preset_name(source))])
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(local_model_folder(source, cache_dir)), local_files_only=True, trust_remote_code=False)
    except Exception as exc:  # as above
        raise _unusable("config.json cannot be used", exc, source, "Give a model that transformers knows by itself") from exc
    return config


def _preset_model(source: str, seed: int) -> "torch.nn.Module":
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM._from_config(config_of(source, None), attn_implementation="sdpa", dtype=torch.float32)


def _folder_model(source: str, dtype: str, cache_dir: Path | None) -> "torch.nn.Module":
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = config_of(source, cache_dir)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(local_model_folder(source, cache_dir)),
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=attention_of(config),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as exc:  # as above
        raise _unusable("the model cannot be loaded", exc, source, "Give a causal language model that is complete") from exc
    module, info = loaded
    unset = sorted((*info["missing_keys"], *(str(key) for key in info.get("mismatched_keys", ()))))
    if unset:
        raise RequestError(
            f"{len(unset)} weights are missing or of another shape: {', '.join(unset[:5])}",
            field="model.source",
            value=source,
            remedy="They would be random; download the model again",
        )
    return module


def _unusable(problem: str, exc: Exception, source: str, remedy: str) -> RequestError:
    """The refusal of a model that the library stumbled over; memory that ran out says nothing about the model and passes through."""
    if memory_kind(exc) is not None:
        raise exc
    words = " ".join(str(exc).split())[:500]
    return refused(
        f"{problem}: {words if isinstance(exc, OSError | ValueError) and words else f'{type(exc).__name__}: {words}'}", source, remedy
    )


def _ready(module: Any, dtype: str, activation_checkpointing: bool) -> "torch.nn.Module":
    import torch

    module = module.to(getattr(torch, dtype))
    module.config.use_cache = False
    if activation_checkpointing:
        if not module.supports_gradient_checkpointing:
            raise RequestError(
                f"{type(module).__name__} cannot recompute activations",
                field="model.activation_checkpointing",
                value="on",
                bound="off",
                remedy="Set model.activation_checkpointing to off",
            )
        recompute_activations(module)
    return module.train()


def recompute_activations(module: Any, wanted: bool = True) -> None:
    """Recompute activations in the backward pass from now on, or keep them. Older releases of transformers call it by another name.

    Transformers hangs a hook on the embedding each time and takes none away: it is taken away here, or a model that is switched to and
    fro would collect them.
    """
    if hasattr(module, "disable_input_require_grads"):
        module.disable_input_require_grads()
    words = "activation" if hasattr(module, "activation_checkpointing_enable") else "gradient"
    getattr(module, f"{words}_checkpointing_{'enable' if wanted else 'disable'}")()


def recomputes_activations(module: Any) -> bool:
    """Whether it does; False for a module that cannot."""
    newer = getattr(module, "is_activation_checkpointing", None)
    return bool(getattr(module, "is_gradient_checkpointing", False) if newer is None else newer)


def switch_back_and_forth(module: Any) -> None:
    """Leave the switch as it is, and every layer as one that has been switched: a layer that never was is another thing to a compiler."""
    if getattr(module, "supports_gradient_checkpointing", False):
        before = recomputes_activations(module)
        recompute_activations(module, not before)
        recompute_activations(module, before)


def _check_state(expected: Mapping[str, tuple[int, ...]], state: Mapping[str, "torch.Tensor"]) -> None:
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
    if wrong:
        raise InternalError(
            f"{len(wrong)} tensors do not fit the model: "
            + ", ".join(f"{name} {given.get(name, 'missing')} for {expected.get(name, 'nothing')}" for name in wrong[:5]),
            remedy="Export from a checkpoint of the same model",
        )
