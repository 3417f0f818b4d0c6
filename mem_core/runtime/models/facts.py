"""What a model is, read from its configuration and the headers of its weight files. No weight is loaded, nothing heavy imported."""

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import Field

from mem_core.domain.units import Value
from mem_core.runtime.models.configuration import check_config, check_folder, count_of, read_config, refused
from mem_core.runtime.models.folders import is_preset, local_model_folder
from mem_core.runtime.models.presets import PRESETS, num_llama_parameters, preset_name
from mem_core.runtime.models.weights import fingerprinted_files, read_safetensors_header, weight_files

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_BUFFERS = (".inv_freq", ".attn.bias", ".attn.masked_bias")


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
    check_folder(folder, source)
    config = read_config(folder, source)
    check_config(config, source)
    files = weight_files(folder, source)
    covered = sorted({*files, *fingerprinted_files(folder, source, files)})
    headers = {path.name: read_safetensors_header(path) for path in covered}
    tensors = {name: entry for path in files for name, entry in headers[path.name].items() if not name.endswith(_BUFFERS)}
    text: dict[str, Any] = config.get("text_config", config)
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    counted = {name: entry for name, entry in tensors.items() if not (tied and name.endswith("lm_head.weight") and len(tensors) > 1)}
    if not counted:
        raise refused("its weight files hold no weights", source)
    stored = Counter(str(entry["dtype"]) for entry in counted.values()).most_common(1)[0][0]
    sizes = {path.name: path.stat().st_size for path in covered}
    return ModelFacts(
        kind=str(config.get("model_type", "unknown")),
        vocab_size=_first(text, ("vocab_size",), source),
        max_positions=count_of(text, ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")),
        num_parameters=sum(math.prod(entry["shape"]) for entry in counted.values()),
        num_layers=_first(text, ("num_hidden_layers", "n_layer", "num_layers"), source),
        hidden_size=_first(text, ("hidden_size", "n_embd", "d_model"), source),
        tied_embeddings=tied,
        stored_dtype=_DTYPES.get(stored, stored),
        fingerprint=_digest({"config": config, "sizes": sizes, "headers": headers}),
        stored_bytes=sum(sizes[path.name] for path in files),
        num_heads=count_of(text, ("num_attention_heads", "n_head", "num_heads")) or 0,
        intermediate_size=count_of(text, ("intermediate_size", "n_inner", "ffn_dim")) or 0,
    )


def _first(config: dict[str, Any], names: tuple[str, ...], source: str) -> int:
    value = count_of(config, names)
    if value is None:
        raise refused(f"config.json has no {names[0]}", source, "Give a causal language model folder")
    return value


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
