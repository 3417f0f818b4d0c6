"""Tiny random models of many architectures, as whole folders with a tokenizer and a chat template. Worker side: imports transformers."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

from mem_core.testing.chat_families import family_folder

_WIDE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_GROUPED = {**_WIDE, "num_key_value_heads": 1, "head_dim": 8}
_SLIDING = {**_GROUPED, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
_NARROW = {"n_embd": 16, "n_layer": 2, "n_head": 2}
ARCHITECTURES: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "llama": _GROUPED,
        "qwen2": {**_WIDE, "num_key_value_heads": 1},
        "qwen3": _GROUPED,
        "gemma2": {**_SLIDING, "query_pre_attn_scalar": 8},
        "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 8},
        "mistral": {**_GROUPED, "sliding_window": None},
        "mixtral": _EXPERTS,
        "phi3": {**_WIDE, "num_key_value_heads": 1},
        "gpt2": _NARROW,
        "gpt_neox": _WIDE,
        "gpt_neo": {
            "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "attention_types": [[["global", "local"], 1]],
        },
        "opt": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 16},
        "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
        "falcon": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        "gpt_oss": {**_EXPERTS, "layer_types": ["sliding_attention", "full_attention"]},
    }
)  # fmt: skip


def family_of(model_type: str) -> str:
    """Whose tokenizer and template it gets: beside a Gemma transformers makes a Gemma tokenizer of any files, which needs its form."""
    return "Gemma" if model_type.startswith("gemma") else "ChatML"


def model_folder(folder: Path, model_type: str, family: str = "", dtype: str = "float32", **settings: Any) -> Path:
    """A folder that loads in transformers: random weights from one seed, positions for 512 tokens. `family`: empty for `family_of`."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

    family_folder(folder, family or family_of(model_type), model_type=model_type)
    (folder / "config.json").unlink()
    vocabulary = len(AutoTokenizer.from_pretrained(str(folder)))
    ends = {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    positions = {"n_positions" if model_type == "gpt2" else "max_position_embeddings": 512}
    asked = {**ARCHITECTURES[model_type], **positions, **ends, **settings}
    made: Any = CONFIG_MAPPING[model_type]
    config = made(vocab_size=vocabulary, **asked)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
