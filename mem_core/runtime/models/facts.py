"""What a model is, read from its configuration and the headers of its weight files. No weight is loaded, nothing heavy imported."""

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import Field

from mem_core.domain.errors import RequestError
from mem_core.domain.units import Value
from mem_core.runtime.models.folders import is_preset, local_model_folder, read_config
from mem_core.runtime.models.presets import PRESETS, num_llama_parameters, preset_name

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_BUFFERS = (".inv_freq", ".attn.bias", ".attn.masked_bias")
_HEADER_LIMIT_BYTES = 100 * 2**20
_CAUSAL = ("ForCausalLM", "LMHeadModel")


class ModelFacts(Value):
    """What doctor, planner and run record need to know of a model."""

    kind: str = Field(description="Architecture, as config.json's model_type says.")
    vocab_size: int = Field(description="Rows of the embedding: token ids must be below it.")
    max_positions: int | None = Field(description="Longest sequence in tokens; None when the model sets no limit.")
    num_parameters: int = Field(description="Trained numbers, tied weights once.")
    num_layers: int
    hidden_size: int
    tied_embeddings: bool
    stored_dtype: str = Field(description="Number format of the stored weights; float32 for presets.")
    fingerprint: str = Field(description="Changes when configuration, weight files' sizes or tensor tables change.")
    stored_bytes: int = Field(default=0, description="Bytes of the weight files; 0 for presets.")
    num_heads: int = 0
    intermediate_size: int = 0


def describe_model(source: str, cache_dir: Path | None = None) -> ModelFacts:
    """Facts of `preset:NAME`, a folder or a URL folder (downloaded to `cache_dir`).

    Raises:
        RequestError: unknown preset, no such folder, no config.json, not a causal language model, no safetensors weights,
            or a weight file that is cut short.
    """
    if is_preset(source):
        return _preset_facts(str(preset_name(source)))
    return _folder_facts(local_model_folder(source, cache_dir), source)


def _preset_facts(name: str) -> ModelFacts:
    config = PRESETS[name]
    return ModelFacts(
        kind="llama",
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        num_parameters=num_llama_parameters(config),
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        tied_embeddings=config["tie_word_embeddings"],
        stored_dtype="float32",
        fingerprint=_digest({"preset": name, **config}),
        num_heads=config["num_attention_heads"],
        intermediate_size=config["intermediate_size"],
    )


def _folder_facts(folder: Path, source: str) -> ModelFacts:
    config = read_config(folder, source)
    _check_causal(config, source)
    files = weight_files(folder, source)
    headers = {path.name: read_safetensors_header(path) for path in files}
    tensors = {name: entry for header in headers.values() for name, entry in header.items() if not name.endswith(_BUFFERS)}
    text = config.get("text_config", config)
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    counted = {name: entry for name, entry in tensors.items() if not (tied and name.endswith("lm_head.weight") and len(tensors) > 1)}
    stored = Counter(str(entry["dtype"]) for entry in counted.values()).most_common(1)[0][0]
    sizes = {path.name: path.stat().st_size for path in files}
    return ModelFacts(
        kind=str(config.get("model_type", "unknown")),
        vocab_size=int(_first(text, ("vocab_size",), source)),
        max_positions=_optional_int(text, ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")),
        num_parameters=sum(math.prod(entry["shape"]) for entry in counted.values()),
        num_layers=int(_first(text, ("num_hidden_layers", "n_layer", "num_layers"), source)),
        hidden_size=int(_first(text, ("hidden_size", "n_embd", "d_model"), source)),
        tied_embeddings=tied,
        stored_dtype=_DTYPES.get(stored, stored),
        fingerprint=_digest({"config": config, "sizes": sizes, "headers": headers}),
        stored_bytes=sum(sizes.values()),
        num_heads=_optional_int(text, ("num_attention_heads", "n_head", "num_heads")) or 0,
        intermediate_size=_optional_int(text, ("intermediate_size", "n_inner", "ffn_dim")) or 0,
    )


def _check_causal(config: dict[str, Any], source: str) -> None:
    architectures = config.get("architectures") or []
    if architectures and not any(str(name).endswith(_CAUSAL) for name in architectures):
        raise RequestError(
            f"the model is a {', '.join(map(str, architectures))}, not a causal language model",
            field="model.source",
            value=source,
            remedy="Give a model whose architecture ends in ForCausalLM",
        )


def weight_files(folder: Path, source: str) -> list[Path]:
    """The safetensors files of a folder, sorted; with an index, exactly those that it names.

    Raises:
        RequestError: none, or pickled weights only (loading those can run code), or a shard of the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise RequestError(
                f"weight files are missing: {', '.join(missing[:5])}", field="model.source", value=source, remedy="Download them again"
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
    problem = "the folder has pickled weights only, which can run code when loaded" if pickled else "the folder has no weights"
    raise RequestError(problem, field="model.source", value=source, bound="*.safetensors", remedy="Convert or download them as safetensors")


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets}, checked against the file's length.

    Raises:
        RequestError: no valid header, or the file is shorter or longer than its header says.
    """
    size_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(size_bytes, _HEADER_LIMIT_BYTES):
                raise ValueError(f"header of {header_bytes} bytes in a file of {size_bytes}")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        expected = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RequestError(
            f"{path.name} is not a safetensors file: {exc}", field="model.source", value=path, remedy="Download the model again"
        ) from exc
    if expected != size_bytes or not header:
        raise RequestError(
            f"{path.name} has {size_bytes} bytes where its header asks for {expected}",
            field="model.source",
            value=path,
            remedy="The file is cut short or damaged; download the model again",
        )
    return header


def _first(config: dict[str, Any], names: tuple[str, ...], source: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise RequestError(f"config.json has no {names[0]}", field="model.source", value=source, remedy="Give a causal language model folder")


def _optional_int(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(config[name]) for name in names if config.get(name) is not None), None)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
