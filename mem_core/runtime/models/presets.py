"""The built-in models: shapes as data. Weights are random, the tokenizer works on bytes and needs no files."""

from types import MappingProxyType
from typing import Any

PRESET_PREFIX = "preset:"
BYTE_VOCAB_SIZE = 384
BYTE_PAD_TOKEN_ID = 0
BYTE_EOS_TOKEN_ID = 1
BYTE_OFFSET = 3


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, positions: int, tied: bool
) -> MappingProxyType[str, Any]:
    return MappingProxyType(
        {
            "vocab_size": BYTE_VOCAB_SIZE,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": intermediate,
            "max_position_embeddings": positions,
            "tie_word_embeddings": tied,
            "attention_dropout": 0.0,
            "pad_token_id": BYTE_PAD_TOKEN_ID,
            "bos_token_id": None,
            "eos_token_id": BYTE_EOS_TOKEN_ID,
        }
    )


# Keyword arguments of transformers.LlamaConfig. Never change one: a run's model fingerprint hangs on it.
PRESETS: MappingProxyType[str, MappingProxyType[str, Any]] = MappingProxyType(
    {
        "llama-nano": _llama(hidden=64, layers=1, heads=4, kv_heads=4, intermediate=128, positions=2_048, tied=True),
        "llama-tiny": _llama(hidden=128, layers=4, heads=4, kv_heads=4, intermediate=352, positions=4_096, tied=True),
        "llama-small": _llama(hidden=512, layers=8, heads=8, kv_heads=8, intermediate=1_408, positions=4_096, tied=True),
        "llama-1b": _llama(hidden=2_048, layers=16, heads=32, kv_heads=8, intermediate=8_192, positions=8_192, tied=True),
    }
)


def preset_name(source: str) -> str | None:
    """`preset:llama-nano` -> `llama-nano`; None when the source is no preset."""
    return source.removeprefix(PRESET_PREFIX) if source.startswith(PRESET_PREFIX) else None


def preset_choices() -> str:
    """The presets as a person would type them."""
    return ", ".join(f"{PRESET_PREFIX}{name}" for name in PRESETS)


def num_llama_parameters(config: MappingProxyType[str, Any]) -> int:
    """Trained numbers of a Llama of this shape, tied weights once, no biases."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    key_value = hidden // heads * config["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * key_value
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    embeddings = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return embeddings + config["num_hidden_layers"] * layer + hidden
