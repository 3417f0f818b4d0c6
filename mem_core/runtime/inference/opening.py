"""A model that answers: a preset, a model folder, or a folder of low-rank adapters with the model that it names.

The one place where inference opens a model, through the same functions as training. Worker side: the functions import torch.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mem_core.core.inference.composition import ModelShape
from mem_core.domain.errors import RequestError
from mem_core.domain.request import ModelSection
from mem_core.domain.results.generation import InferenceDevice, InferenceDtype
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, open_regular, read_json, why
from mem_core.runtime.inference.prompt_encoder import PromptEncoder
from mem_core.runtime.models.adapters import BASE_FOLDER, WEIGHTS_NAME
from mem_core.runtime.models.build import build_model, load_tokenizer
from mem_core.runtime.models.encoding import tokenizer_files
from mem_core.runtime.models.facts import ModelFacts, describe_model
from mem_core.runtime.models.folders import is_preset, local_model_folder
from mem_core.runtime.models.trial import generation_settings
from mem_core.runtime.models.weights import weight_files
from mem_core.runtime.ranks.worker.classify import memory_kind

if TYPE_CHECKING:
    import torch

ADAPTER_NAME = "adapter_config.json"
_SMALL = ("config.json", "generation_config.json", ADAPTER_NAME)
_REMEDY = "Give an adapter folder that peft has written, or export the run again."


@dataclass(frozen=True)
class Source:
    """Where a model lies. `adapter` is the folder of its adapters, None where it has none; `source` is a preset or a folder."""

    source: str
    adapter: Path | None = None

    @classmethod
    def of(cls, model: str) -> "Source":
        """Raises RequestError: no model, or an adapter folder that cannot be used."""
        if is_preset(model) or not (Path(model) / ADAPTER_NAME).is_file():
            return cls(model)
        folder = Path(model)
        config = _adapter_config(folder)
        if config.get("peft_type") != "LORA":
            raise _refused("only low-rank adapters can be used", folder, str(config.get("peft_type")))
        if not (folder / WEIGHTS_NAME).is_file():
            raise _refused(f"the adapter folder has no {WEIGHTS_NAME}", folder, "")
        base = config.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise _refused("the adapter does not name the model that it belongs to", folder, "")
        beside = folder / BASE_FOLDER  # of a preset, written beside the adapters; the folder may have been moved since
        return cls(str(beside) if beside.is_dir() and not Path(base).is_dir() else base, folder)

    def tokenizer(self) -> str:
        """The folder whose tokenizer is used: the adapter's own where it brings one."""
        own = self.adapter is not None and bool(tokenizer_files(self.adapter, chat=False))
        return str(self.adapter) if own else self.source

    def files(self) -> tuple[Path, ...]:
        """Every file that decides what the model answers; none of a preset."""
        if is_preset(self.source):
            return ()
        base = local_model_folder(self.source)
        found = [*weight_files(base, self.source), *(base / name for name in tokenizer_files(base))]
        found += [base / name for name in _SMALL]
        if self.adapter is not None:
            found += [self.adapter / name for name in (*_SMALL, WEIGHTS_NAME, *tokenizer_files(self.adapter))]
        return tuple(dict.fromkeys(path for path in found if path.is_file()))


def model_identity(model: str) -> str:
    """SHA-256 of all that decides what a model answers, by content. Imports nothing heavy.

    Raises:
        RequestError: no such model, or a file of it cannot be read.
    """
    found = Source.of(model)
    digest = hashlib.sha256(describe_model(found.source).fingerprint.encode())
    for path in found.files():
        try:
            with open_regular(path) as file:
                digest.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        except OSError as exc:
            raise _refused(f"{path.name} cannot be read: {exc.strerror}", path.parent, "") from exc
    return digest.hexdigest()


@dataclass(frozen=True)
class OpenModel:
    """A model on its device in evaluation mode, and what belongs to it."""

    module: "torch.nn.Module"
    encoder: PromptEncoder
    stop_tokens: tuple[int, ...]
    facts: ModelFacts
    dtype: Literal["float32", "bfloat16", "float16"]

    @property
    def shape(self) -> ModelShape:
        """What decides the memory of a batch."""
        facts = self.facts
        inner = facts.intermediate_size or 4 * facts.hidden_size
        itemsize = 4 if self.dtype == "float32" else 2
        return ModelShape(facts.num_layers, facts.hidden_size, inner, facts.vocab_size, itemsize)


def device_kind(asked: InferenceDevice) -> Literal["cpu", "cuda"]:
    """The device that is used. Raises RequestError: one is asked for that is not there."""
    from mem_core.runtime.ranks.worker.device import cuda_is_there

    there = asked != "cpu" and cuda_is_there()
    if asked == "cuda" and not there:
        raise RequestError(
            "torch finds no CUDA device",
            field="--device",
            value="cuda",
            bound="auto, cpu",
            remedy="Leave --device out, or mend the driver.",
        )
    return "cuda" if there else "cpu"


def open_model(model: str, dtype: InferenceDtype, device: Literal["cpu", "cuda"]) -> OpenModel:
    """Build it. `auto` is float32 on a CPU, where half precision is many times slower, and the stored format elsewhere.

    Raises:
        RequestError: the model, its tokenizer, its adapters or its generation settings cannot be used.
    """
    found = Source.of(model)
    facts = describe_model(found.source)
    stored = facts.stored_dtype if facts.stored_dtype in ("float32", "bfloat16", "float16") else "float32"
    chosen: Any = dtype if dtype != "auto" else "float32" if device == "cpu" else stored
    tokenizer = load_tokenizer(found.tokenizer())
    with_adapters = found.adapter is not None
    module = build_model(ModelSection(source=found.source), 1, 0, "float32" if with_adapters else chosen, activation_checkpointing=False)
    if found.adapter is not None:
        module = _merged(module, found.adapter)
    encoder = PromptEncoder(tokenizer)
    placed: Any = module.to(device=device, dtype=_torch_dtype(chosen)).eval()
    return OpenModel(placed, encoder, stop_tokens(found, placed, encoder), facts, chosen)


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    return getattr(torch, name)


def _merged(module: Any, adapter: Path) -> Any:
    """The same model with the adapters within its weights: it computes what they add, and takes no longer for it."""
    from peft import PeftModel

    try:
        with_adapters: Any = PeftModel.from_pretrained(module, str(adapter.absolute()), local_files_only=True)
        return with_adapters.merge_and_unload(safe_merge=True)
    except Exception as exc:  # whatever the library makes of other people's files
        if memory_kind(exc) is not None:
            raise
        words = " ".join(str(exc).split())[:300]
        raise _refused(f"the adapters cannot be put on the model: {type(exc).__name__}: {words}", adapter, "") from exc


def stop_tokens(found: Source, module: Any, encoder: PromptEncoder) -> tuple[int, ...]:
    """Those of generation_config.json; without any those of config.json, and the tokenizer's own end token where neither says one."""
    settings = None if is_preset(found.source) else generation_settings(local_model_folder(found.source), found.source)
    for said in (getattr(settings, "eos_token_id", None), getattr(module.config, "eos_token_id", None), encoder.eos_token_id):
        if said is not None:
            return tuple(int(token) for token in (said if isinstance(said, list | tuple) else (said,)))
    return ()


def _adapter_config(folder: Path) -> dict[str, Any]:
    try:
        config = read_json(folder / ADAPTER_NAME, RECORD_LIMIT_BYTES)
    except (OSError, ValueError) as exc:
        raise _refused(f"{ADAPTER_NAME} cannot be read: {why(exc)}", folder, "") from exc
    if not isinstance(config, dict):
        raise _refused(f"{ADAPTER_NAME} holds no object", folder, "")
    return config


def _refused(problem: str, folder: Path, value: str) -> RequestError:
    return RequestError(problem, field="MODEL_OR_RUN", value=value or folder, remedy=_REMEDY)
