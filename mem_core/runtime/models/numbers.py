"""The numbers of a model that the doctor calculates with, read from its configuration files. No weight is loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mem_core.domain.environment import ModelNumbers
from mem_core.infrastructure.storage.reading import read_json
from mem_core.runtime.models.router import is_computable

_TOKENIZER_FILE = "tokenizer.json"
_SIZE_LIMIT_BYTES = 200 * 2**20
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")
# The coefficients of what mixture-of-experts models add where output_router_logits is on: 0 adds nothing. All defaults are off.
_ROUTER_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_ROUTER_ON = "output_router_logits: true"
_OTHER_COEFFICIENTS = ("z_loss_coefficient",)


def read_model_numbers(source: str, cache_dir: Path | None = None) -> ModelNumbers:
    """Numbers of `preset:NAME`, a folder or a URL folder (downloaded to `cache_dir`).

    Raises:
        RequestError: no such model, or not a causal language model with safetensors weights.
    """
    from mem_core.runtime.models.configuration import count_of, read_config
    from mem_core.runtime.models.facts import describe_model
    from mem_core.runtime.models.folders import is_preset, local_model_folder

    facts = describe_model(source, cache_dir)
    folder = None if is_preset(source) else local_model_folder(source, cache_dir)
    config: dict[str, Any] = read_config(folder, source) if folder is not None else {}
    kv_heads = count_of(config.get("text_config", config), ("num_key_value_heads",))
    return ModelNumbers(
        num_parameters=facts.num_parameters,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        vocab_size=facts.vocab_size,
        num_heads=facts.num_heads or 1,
        num_kv_heads=kv_heads,
        max_positions=facts.max_positions,
        tokenizer_vocab_size=tokenizer_size(folder) if folder is not None else None,
        tied=facts.tied_embeddings,
        added_losses=tuple(added for added in added_losses(config) if not (trains_router_loss(config) and added == _ROUTER_ON)),
        router_loss=trains_router_loss(config),
        has_chat_template=has_chat_template(folder) if folder is not None else False,
    )


def added_losses(config: dict[str, Any]) -> tuple[str, ...]:
    """Settings of a `config.json`, nested ones too, by which the model's own loss is more than the cross-entropy of its logits."""
    return tuple(dict.fromkeys(_added(config)))


def trains_router_loss(config: dict[str, Any]) -> bool:
    """Whether a `config.json` asks for a router's loss that is trained on; within another model's configuration it is not."""
    nested = any(_ROUTER_ON in _added(value) for value in config.values() if isinstance(value, dict))
    return _ROUTER_ON in added_losses(config) and not nested and is_computable(str(config.get("model_type", "")))


def _added(config: dict[str, Any]) -> Iterator[str]:
    coefficients = [config[name] for name in _ROUTER_COEFFICIENTS if isinstance(config.get(name), int | float)]
    if config.get("output_router_logits") is True and (not coefficients or any(coefficients)):
        yield _ROUTER_ON
    for name in _OTHER_COEFFICIENTS:
        if isinstance(config.get(name), int | float) and config[name]:
            yield f"{name}: {config[name]}"
    for value in config.values():
        if isinstance(value, dict):
            yield from _added(value)


def has_chat_template(folder: Path) -> bool:
    """Whether the folder's tokenizer brings a template that renders messages."""
    if any((folder / name).exists() for name in _TEMPLATES):
        return True
    try:
        return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def tokenizer_size(folder: Path) -> int | None:
    """Largest token id of a fast tokenizer plus one, added tokens included; None when its file is missing or unreadable.

    The largest id and not the count: that is what indexes the embedding.
    """
    try:
        content = read_json(folder / _TOKENIZER_FILE, _SIZE_LIMIT_BYTES)
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens", ())]
        return max(map(int, ids)) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
