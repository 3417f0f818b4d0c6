"""Sizes of a model's parts under a request, by its numbers alone: what trains, and what a pass keeps for its backward. Pure."""

from mem_core.domain.environment import ModelNumbers
from mem_core.domain.request import LoraSection, RuntimeRequest

DROPPED_COPIES = 2  # the input that dropout has thinned, and the mask, which on a CPU is of the same number format


def trained_parameters(model: ModelNumbers, request: RuntimeRequest) -> int:
    """Parameters that get gradients: as counted where the model was built, else by size alone. An adapter of rank r on a layer of m inputs
    and n outputs has r (m + n) of them; `auto` is taken for the seven layers of a Llama block, a named one for one of hidden x hidden."""
    lora = request.model.lora
    if model.num_trainable_parameters is not None or lora is None:
        return model.num_trainable_parameters or model.num_parameters
    hidden, kv, intermediate = model.hidden_size, _kv_size(model), _intermediate_size(model)
    named = 0 if lora.target_modules == "auto" else len(lora.target_modules)
    sides = named * 2 * hidden if named else 2 * 2 * hidden + 2 * (hidden + kv) + 3 * (hidden + intermediate)
    return model.num_layers * lora.rank * sides


def activation_bytes(model: ModelNumbers, request: RuntimeRequest, tokens: int, item: int, *, checkpointing: bool) -> int:
    """What a forward pass over `tokens` keeps, logits apart; `checkpointing`: one layer in full and the others' inputs."""
    hidden, kv, intermediate = model.hidden_size, _kv_size(model), _intermediate_size(model)
    lora = request.model.lora
    dropped = DROPPED_COPIES * _adapted_inputs(model, lora) if lora is not None and lora.dropout > 0 else 0
    per_layer = tokens * (13 * hidden + 3 * kv + 4 * intermediate + dropped) * item
    return per_layer + tokens * hidden * item * model.num_layers if checkpointing else per_layer * model.num_layers


def _adapted_inputs(model: ModelNumbers, lora: LoraSection) -> int:
    """Sum of the widths of the adapted layers' inputs, in one block."""
    if lora.target_modules == "auto":
        return 6 * model.hidden_size + _intermediate_size(model)
    return len(lora.target_modules) * model.hidden_size


def _kv_size(model: ModelNumbers) -> int:
    return model.hidden_size // model.num_heads * (model.num_kv_heads or model.num_heads)


def _intermediate_size(model: ModelNumbers) -> int:
    return model.intermediate_size or 4 * model.hidden_size
