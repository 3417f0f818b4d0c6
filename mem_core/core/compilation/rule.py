"""The rule behind `model.compile: auto` (decision record 0010).

Compiled and eager code give the same numbers up to rounding and not to the bit, so equal requests must always be answered alike: by
arithmetic over the request and the model's sizes. A measurement at the start would answer differently on a busy day.
"""

from dataclasses import dataclass

from mem_core.domain.environment import ModelNumbers
from mem_core.domain.request import RuntimeRequest

WORTH_IT = 10  # times as long as compiling takes must a run be expected to train, since about a fifth of that time is saved
COMPILE_BASE_S, COMPILE_LAYER_S = 35.0, 12.0
STEP_LAYER_S = 1e-3  # what a layer's operations cost however few tokens they work on
FLOPS_PER_S = 150e9
FLOPS_PER_PARAMETER = 6  # of a forward and backward pass over a token (Kaplan et al. 2020, section 2.1)
_STAGE_THREE = 3


@dataclass(frozen=True, slots=True)
class Compilation:
    """Whether passes are compiled, and why (not), as a half sentence for people."""

    wanted: bool
    why: str


def compilation_of(request: RuntimeRequest, model: ModelNumbers | None, device: str, dtype: str, steps: int) -> Compilation:
    """What a run of so many steps does. `model` None: its sizes are not known, which leaves `auto` eager."""
    asked = request.model.compile
    if asked == "off":
        return Compilation(False, "model.compile is off")
    hindrance = hindrance_of(request, model)
    if hindrance or asked == "on":
        return Compilation(not hindrance, hindrance or "model.compile is on")
    if device != "cpu" or dtype != "float32":
        return Compilation(False, f"auto is for float32 on a CPU, where it was measured, not for {dtype} on {device}")
    if request.model.activation_checkpointing == "on" or model is None:
        return Compilation(False, "passes that recompute activations are not compiled")
    trains_s, compiles_s = expected_s(request, model, steps), compile_s(model)
    if trains_s < WORTH_IT * compiles_s:
        return Compilation(False, f"{steps:,} steps of this size are too few to win back some {compiles_s:.0f} s of compiling")
    return Compilation(True, f"{steps:,} steps win back some {compiles_s:.0f} s of compiling many times over")


def hindrance_of(request: RuntimeRequest, model: ModelNumbers | None = None) -> str:
    """What keeps passes from being compiled whatever is asked; empty where nothing does."""
    if request.parallel.zero_stage == _STAGE_THREE:
        return "at ZeRO stage 3 weights are gathered by hooks in the middle of a pass, which is not compiled"
    if model is not None and model.router_loss:
        return "a router's loss is computed row by row, which is not compiled"
    return ""


def expected_s(request: RuntimeRequest, model: ModelNumbers, steps: int) -> float:
    """Roughly how long so many steps take uncompiled on the machine that the rule was measured on, in seconds."""
    tokens = request.training.global_batch_size * request.data.sequence_length
    arithmetic_s = FLOPS_PER_PARAMETER * model.num_parameters * tokens / FLOPS_PER_S
    return steps * (STEP_LAYER_S * (model.num_layers + 1) + arithmetic_s)


def compile_s(model: ModelNumbers) -> float:
    """Roughly how long compiling takes there from an empty cache, in seconds."""
    return COMPILE_BASE_S + COMPILE_LAYER_S * model.num_layers
