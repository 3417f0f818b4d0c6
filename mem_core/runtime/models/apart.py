"""Whether a model keeps documents apart that share a row: asked of the architecture itself, made small.

Training tells a model where documents begin by positions that start anew, and leaves the rest to its attention masks. Not every
architecture heeds that: some take no positions, some carry a state from token to token, some build their masks otherwise. What one does
depends on its configuration and on the library's version, so that no list of names would hold: a tiny random model of the same
configuration is run on two documents together and apart.
"""

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mem_core.runtime.models.build import config_of, random_model
from mem_core.runtime.ranks.worker.classify import memory_kind

if TYPE_CHECKING:
    import torch

_VOCABULARY = 64
_MOST_LAYERS = 4
_TOLERANCE = 1e-4  # of the largest logit; what is seen moves them by tenths
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k", "moe_topk")
_PARTS_OF_HEADS = ("rotary_dim", "q_lora_rank", "kv_lora_rank")
_GROUPS = ("n_group", "topk_group")
_LONG_LISTS = ("layer_types", "attention_layers", "no_rope_layers", "mlp_only_layers", "layers_block_type", "mlp_layer_types")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def why_not_apart(source: str) -> str:
    """Why the model of a folder cannot keep documents apart; empty where it can.

    Raises:
        RequestError: transformers cannot use its config.
    """
    config = config_of(source)
    try:
        _make_small(config)
        model: Any = random_model(config)
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return "it takes no positions"
        return "" if _is_apart(model) else "tokens of one document see those before it"
    except Exception as exc:
        if memory_kind(exc) is not None:
            raise
        return f"it could not be tried: {type(exc).__name__}: {exc}"[:160]


def _is_apart(model: Any) -> bool:
    """Whether the second of two documents gives the same logits with the first before it and alone, and the other way round: whether
    the same tokens give others where they are one document, so that the test is able to tell."""
    import torch

    random = torch.Generator().manual_seed(1)
    first, second = (torch.randint(4, _VOCABULARY, (1, length), generator=random) for length in (7, 9))
    both = torch.cat([first, second], dim=1)
    places = torch.cat([torch.arange(7), torch.arange(9)])[None]
    with torch.no_grad():
        together = model(input_ids=both, position_ids=places, use_cache=False).logits[0, 7:]
        alone = model(input_ids=second, use_cache=False).logits[0]
        as_one = model(input_ids=both, use_cache=False).logits[0, 7:]
    return _near(together, alone) and not _near(together, as_one)


def _near(one: "torch.Tensor", other: "torch.Tensor") -> bool:
    scale = max(float(other.abs().max()), 1e-9)
    return bool((one - other).abs().max() <= _TOLERANCE * scale)


def _make_small(config: Any) -> None:
    """The same architecture with few and narrow layers; every kind of layer that it has is kept, as far as four go."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        _shrink(part)


def _shrink(config: Any) -> None:
    before = next((getattr(config, name) for name in _HEADS if isinstance(getattr(config, name, None), int)), 0)
    keys = next((getattr(config, name) for name in _KEY_HEADS if isinstance(getattr(config, name, None), int)), before)
    _set(config, _HEADS, 4)
    _set(config, _KEY_HEADS, 4 if keys == before else 2)
    _set(config, _HIDDEN, 32)
    _set(config, _WIDTHS, 32)
    _set(config, _EXPERTS, 4)
    _set(config, _CHOSEN, 2)
    _set(config, _PARTS_OF_HEADS, 4)
    _set(config, _GROUPS, 1)
    _set(config, ("head_dim", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
    config.vocab_size = _VOCABULARY
    layers = min(_MOST_LAYERS, max((getattr(config, name) for name in _LAYERS if isinstance(getattr(config, name, None), int)), default=2))
    _set(config, _LAYERS, layers)
    for name in _LONG_LISTS:
        kinds = getattr(config, name, None)
        if isinstance(kinds, list | tuple) and len(kinds) > layers:
            setattr(config, name, _some_of_each(list(kinds), layers))
    _set(config, _TOKENS, 3)


def _some_of_each(kinds: list[Any], count: int) -> list[Any]:
    """`count` of a list of kinds, a kind at least once where they are few."""
    different = list({str(kind): kind for kind in kinds}.values())[:count]
    return [*different, *kinds[: count - len(different)]]


def _set(config: Any, names: tuple[str, ...], value: int) -> int:
    for name in names:
        if isinstance(getattr(config, name, None), int):
            with suppress(AttributeError):  # some are worked out from others
                setattr(config, name, min(value, getattr(config, name)))
    return value
