"""The numbers of a model that the doctor calculates with, read from its configuration files. No weight is loaded."""

import json
from pathlib import Path
from typing import Any

from mem_core.domain.environment import ModelNumbers

_TOKENIZER_FILE = "tokenizer.json"
_SIZE_LIMIT_BYTES = 200 * 2**20


def read_model_numbers(source: str, cache_dir: Path | None = None) -> ModelNumbers:
    """Numbers of `preset:NAME`, a folder or a URL folder (downloaded to `cache_dir`).

    Raises:
        RequestError: no such model, or not a causal language model with safetensors weights.
    """
    from mem_core.runtime.models.facts import describe_model
    from mem_core.runtime.models.folders import is_preset, local_model_folder, read_config

    facts = describe_model(source, cache_dir)
    folder = None if is_preset(source) else local_model_folder(source, cache_dir)
    config: dict[str, Any] = read_config(folder, source) if folder is not None else {}
    kv_heads = config.get("text_config", config).get("num_key_value_heads")
    return ModelNumbers(
        num_parameters=facts.num_parameters,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        vocab_size=facts.vocab_size,
        num_heads=facts.num_heads or 1,
        num_kv_heads=int(kv_heads) if kv_heads else None,
        max_positions=facts.max_positions,
        tokenizer_vocab_size=tokenizer_size(folder) if folder is not None else None,
        tied=facts.tied_embeddings,
    )


def tokenizer_size(folder: Path) -> int | None:
    """Largest token id of a fast tokenizer plus one, added tokens included; None when its file is missing or unreadable.

    The largest id and not the count: that is what indexes the embedding.
    """
    path = folder / _TOKENIZER_FILE
    try:
        if path.stat().st_size > _SIZE_LIMIT_BYTES:
            return None
        content = json.loads(path.read_bytes())
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens", ())]
        return max(map(int, ids)) + 1
    except (OSError, ValueError, KeyError, TypeError):
        return None
