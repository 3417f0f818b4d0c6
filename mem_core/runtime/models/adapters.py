"""Low-rank adapters (Hu et al. 2021) on a built model, by peft: which layers get one, where it is put, what its folder looks like.

Worker side: the functions import torch and peft. The model keeps its class: peft's layers take the place of its linear ones, so that
whoever holds the module need not know of them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mem_core.domain.errors import RequestError
from mem_core.domain.request import LoraSection, ModelSection
from mem_core.infrastructure.storage.appearing import appearing
from mem_core.runtime.models.build import save_pretrained_folder, write_tokenizer
from mem_core.runtime.models.folders import is_preset, local_model_folder

if TYPE_CHECKING:
    import torch

ADAPTER = "default"
WEIGHTS_NAME, BASE_FOLDER = "adapter_model.safetensors", "base"
_PEFT_PREFIX = "base_model.model."  # the module path from a PeftModel to the model inside it
_OWN_ENDING = f".{ADAPTER}.weight"
_BASE = ".base_layer"
_MOST_NAMED = 40


def linear_layers(module: "torch.nn.Module") -> dict[str, "torch.nn.Module"]:
    """Name -> layer of everything that an adapter can be put on: torch's linear layers and GPT-2's own form of them."""
    import torch
    from transformers.pytorch_utils import Conv1D

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)}


def adapted_layers(module: "torch.nn.Module", lora: LoraSection) -> tuple[str, ...]:
    """Full names of the layers that get an adapter, in the module's order. `auto`: every linear one but the output head.

    Raises:
        RequestError: a name in `target_modules` is no linear layer of this model, or there is nothing to adapt.
    """
    layers, head = linear_layers(module), _output_head(module)
    if lora.target_modules == "auto":
        chosen = tuple(name for name, layer in layers.items() if layer is not head)
        if not chosen:
            raise _refused("the model has no linear layers", "auto", "", "Set model.lora to null: every weight is then trained.")
        return chosen
    unknown = [target for target in lora.target_modules if not any(_is_named(name, target) for name in layers)]
    if unknown:
        endings = tuple(dict.fromkeys(name.rpartition(".")[2] for name in layers))
        raise _refused(
            f"the model has no linear layer of that name: {', '.join(unknown)}", ", ".join(lora.target_modules), _listed(endings),
            "Name some of these, or leave it at auto.",
        )  # fmt: skip
    chosen = tuple(name for name in layers if any(_is_named(name, target) for target in lora.target_modules))
    if head is not None and any(layers[name] is head for name in chosen) and _is_tied(module, head):
        raise _refused(
            "the output head shares its weights with the embedding and can have no adapter", ", ".join(lora.target_modules), "",
            "Leave it out; auto takes every other linear layer.",
        )  # fmt: skip
    return chosen


def left_out_experts(module: "torch.nn.Module") -> tuple[str, ...]:
    """Weights of three dimensions, which mixture-of-experts models keep their experts in: no linear layers, so no adapter fits on them."""
    return tuple(dict.fromkeys(_any_layer(name) for name, parameter in module.named_parameters() if parameter.dim() >= 3))


def adapter_config(module: "torch.nn.Module", lora: LoraSection) -> Any:
    """peft's configuration of the adapters of an untouched `module`.

    Raises:
        RequestError: as `adapted_layers`.
    """
    import torch
    from peft import LoraConfig

    chosen, layers = adapted_layers(module, lora), linear_layers(module)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # type: ignore[arg-type] - annotated as a whole number
        lora_dropout=lora.dropout,
        target_modules=list(_shortest(chosen, list(layers))),
        bias="none",
        task_type="CAUSAL_LM",
        fan_in_fan_out=not isinstance(layers[chosen[0]], torch.nn.Linear),
    )


def put_adapters(module: "torch.nn.Module", lora: LoraSection, seed: int) -> "torch.nn.Module":
    """The same module with adapters of its own number format, of which alone the gradient is asked. B is zero, so that it computes
    what it did; A is drawn from `seed`, in float32 on the CPU, the same bits on every rank. Torch's random state is left as it was.

    Raises:
        RequestError: as `adapted_layers`.
    """
    import torch
    from peft import inject_adapter_in_model

    reference = next(module.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_own_seed(seed))
        inject_adapter_in_model(adapter_config(module, lora), module, ADAPTER, low_cpu_mem_usage=reference.device.type == "meta")
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(reference.dtype)
    return module


def adapter_tensors(trained: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """peft's own names of trained adapter weights, by which it finds them in a folder."""
    return {f"{_PEFT_PREFIX}{name.removesuffix(_OWN_ENDING)}.weight": tensor for name, tensor in trained.items()}


def merge_adapters(module: "torch.nn.Module", trained: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """The weights of a model without adapters that computes the same: `W + alpha / rank * B A`. `module` has its adapters; they are
    given the values `trained`. Tied weights come once, under the names of the untouched model."""
    from peft.tuners.lora import LoraLayer

    module.load_state_dict(dict(trained), strict=False)
    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)  # type: ignore[attr-defined] - every layer that adapters are put on has it
    return untouched(module)


def export_adapters(
    model: ModelSection,
    trained: Mapping[str, "torch.Tensor"],
    module: Any,
    folder: Path,
    cache_dir: Path | None = None,
    finish: Callable[[Path], None] = lambda staging: None,
) -> None:
    """Write the folder that `PeftModel.from_pretrained` loads, with the tokenizer; it appears whole or not at all. `module` is the model
    with its adapters. `finish` may add files before it appears.

    It names the model that the adapters belong to. A preset is a model that no loader knows: it is written beside them, into `base/`.
    """
    from safetensors.torch import save_file

    assert model.lora is not None
    preset = is_preset(model.source)
    base = folder / BASE_FOLDER if preset else local_model_folder(model.source, cache_dir)
    config = module.peft_config[ADAPTER]
    config.base_model_name_or_path, config.inference_mode = str(base.absolute()), True
    with appearing(folder) as staging:
        save_file(
            {name: tensor.contiguous() for name, tensor in adapter_tensors(trained).items()}, staging / WEIGHTS_NAME, {"format": "pt"}
        )
        config.save_pretrained(str(staging))
        write_tokenizer(model.source, staging, cache_dir)
        if preset:
            save_pretrained_folder(model, untouched(module), staging / BASE_FOLDER)
        finish(staging)


def untouched(module: "torch.nn.Module") -> dict[str, "torch.Tensor"]:
    """The weights under the adapters, by their names in a model without any."""
    return {name.replace(_BASE, ""): value.detach() for name, value in module.named_parameters() if not name.endswith(_OWN_ENDING)}


def _own_seed(seed: int) -> int:
    """Another stream than the one that a preset's own weights are drawn from."""
    return int.from_bytes(hashlib.sha256(f"adapters of seed {seed}".encode()).digest()[:8], "big") >> 1


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _shortest(chosen: Sequence[str], layers: Sequence[str]) -> tuple[str, ...]:
    """Last parts of the names where these choose the same layers, as people write them; else the full names."""
    endings = tuple(dict.fromkeys(name.rpartition(".")[2] for name in chosen))
    same = [name for name in layers if any(_is_named(name, ending) for ending in endings)] == list(chosen)
    return endings if same else tuple(chosen)


def _output_head(module: Any) -> Any:
    return module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None


def _is_tied(module: Any, head: Any) -> bool:
    return module.get_input_embeddings().weight is head.weight


def _any_layer(name: str) -> str:
    """A parameter's name with a star for the number of its layer, so that thirty layers are named once."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _refused(problem: str, value: str, bound: str, remedy: str) -> RequestError:
    return RequestError(problem, field="model.lora.target_modules", value=value, bound=bound, remedy=remedy)
