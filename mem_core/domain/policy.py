"""What the policy engine decided, and why; and the values that it decides on: bounds, health, history."""

import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mem_core.domain.directive import DIRECTIVE_SIZE_LIMIT_BYTES, ExecutiveDirective, Refusal
from mem_core.domain.plan import Hyperparams, MemoryPlan
from mem_core.domain.units import Value

CUDA_LANE = "v89_real_chaos_mem_lane"
CPU_LANE = "cpu_mem_lane"

Approval = Literal["granted", "refused", "timed_out", "not_asked"]


class Clamp(Value):
    """One proposed value that was not taken as it was."""

    field: str
    proposed: float
    applied: float
    bound: str
    reason: str


class PolicyDecision(Value):
    """Allow or refuse, the lane, and what reaches the engine. The same input always gives the same decision.

    `allow` is False when the directive (or the request, e.g. `cuda_unavailable`) was refused; then `applied_hyperparams`
    are the deterministic defaults of the request (after instability: none of them above the current value).
    `reason` is a stable word; `detail` is for people. `request_refused` tells the refusals that end the run (exit code 80)
    from those of a directive, after which training goes on. `proposed_hyperparams` is what a person would approve, set only
    where an approval is missing or was refused. `applied_memory` is the plan's memory after the health gate. `not_applicable` names
    what was asked for and has no effect on this run.
    """

    allow: bool
    reason: str
    detail: str = ""
    lane: str
    applied_hyperparams: Hyperparams
    clamps: tuple[Clamp, ...] = ()
    not_applicable: tuple[str, ...] = ()
    directive: dict[str, Any] | None = None
    request_refused: bool = False
    proposed_hyperparams: Hyperparams | None = None
    applied_memory: MemoryPlan | None = None


class NumberBound(Value):
    """A closed interval of finite numbers."""

    at_least: float = Field(allow_inf_nan=False, strict=True)
    at_most: float = Field(allow_inf_nan=False, strict=True)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least} is above at_most {self.at_most}; swap or correct them")
        return self


class IntegerBound(Value):
    """A closed interval of integers."""

    at_least: int = Field(strict=True)
    at_most: int = Field(strict=True)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least} is above at_most {self.at_most}; swap or correct them")
        return self


HARD_LIMITS: dict[str, tuple[float, float]] = {
    "lr_multiplier": (1e-6, 10.0),
    "gradient_clip_norm": (1e-6, 1_000.0),
    "loss_scale_initial_power": (0, 32),
}
"""What no policy file may widen: outside of these a value makes no sense to the engine."""


class LaneBounds(Value):
    """The bounds of one lane: what advice may do there, and how often."""

    lane: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    lr_multiplier: NumberBound = NumberBound(at_least=0.05, at_most=0.85)
    gradient_clip_norm: NumberBound = NumberBound(at_least=0.05, at_most=1.25)
    loss_scale_initial_power: IntegerBound = IntegerBound(at_least=0, at_most=10)
    cool_down_segments: int = Field(
        default=2, ge=0, le=1_000, strict=True, description="Segments after a change in which no other is taken."
    )
    canary_segments: int = Field(
        default=1, ge=0, le=1_000, strict=True, description="Segments over which a change is watched; 0 turns it off."
    )
    canary_max_loss_increase: float = Field(
        default=0.1, ge=0, le=100, allow_inf_nan=False, strict=True, description="Relative loss increase that reverts."
    )
    revert_cool_down_segments: int = Field(
        default=5, ge=0, le=1_000, strict=True, description="Segments after a revert in which no change is taken."
    )
    loss_spike_increase: float = Field(
        default=0.5, gt=0, le=100, allow_inf_nan=False, strict=True, description="Relative loss rise over a segment that is instability."
    )
    directive_size_limit_bytes: int = Field(default=DIRECTIVE_SIZE_LIMIT_BYTES, ge=2, le=1_048_576, strict=True)

    @model_validator(mode="after")
    def _inside_hard_limits(self) -> Self:
        for name, (lowest, highest) in HARD_LIMITS.items():
            bound: NumberBound | IntegerBound = getattr(self, name)
            if bound.at_least < lowest or bound.at_most > highest:
                raise ValueError(
                    f"{name} {bound.at_least} to {bound.at_most} leaves what the engine can take; stay within {lowest} to {highest}"
                )
        return self


class PolicyBounds(Value):
    """One lane per kind of device. The defaults are the built-in lanes."""

    cpu: LaneBounds = LaneBounds(lane=CPU_LANE)
    cuda: LaneBounds = LaneBounds(lane=CUDA_LANE)

    def of(self, device: Literal["cpu", "cuda"]) -> LaneBounds:
        """The lane of a device."""
        return self.cuda if device == "cuda" else self.cpu


class SegmentHealth(Value):
    """How the last committed segment went.

    Only facts of the committed trajectory belong into the loss and step fields (no timing, no fault that was redone), so
    that a killed and resumed run is judged like an undisturbed one. The memory fields decide about memory alone.
    A non-finite loss is kept as None and sets `non_finite`.
    """

    loss_mean: float | None = Field(default=None, description="Mean loss over the segment, where known; less noisy than the last one.")
    loss_first: float | None = None
    loss_last: float | None = None
    skipped_steps: int = Field(default=0, ge=0)
    non_finite: bool = False
    loss_spike: bool = False
    ooms_absorbed: int = Field(default=0, ge=0)
    memory_used_fraction: float | None = Field(default=None, description="Peak ÷ budget of the binding memory.")

    @model_validator(mode="before")
    @classmethod
    def _non_finite_is_none(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        values: dict[str, Any] = dict(raw)  # pyright: ignore[reportUnknownArgumentType]
        for name in ("loss_mean", "loss_first", "loss_last", "memory_used_fraction"):
            value = values.get(name)
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
                values["non_finite"] = values.get("non_finite", False) or name != "memory_used_fraction"
        return values

    @property
    def loss(self) -> float | None:
        """The loss that stands for the segment: its mean, else its last."""
        return self.loss_mean if self.loss_mean is not None else self.loss_last

    @property
    def unstable(self) -> bool:
        """Something was skipped, jumped or was not a number."""
        return self.non_finite or self.loss_spike or self.skipped_steps > 0


class PolicyHistory(Value):
    """What the policy engine has to remember from segment to segment; folded from the recorded decisions, never kept apart."""

    current: Hyperparams | None = Field(default=None, description="Values in force in the last segment; None before the first.")
    current_memory: MemoryPlan | None = None
    cool_down_until_segment: int = Field(default=0, ge=0, description="First segment that may change values again.")
    canary_until_segment: int | None = Field(
        default=None, description="Last decision that judges the newest change; None: nothing to judge."
    )
    canary_baseline_loss: float | None = Field(default=None, description="Loss of the segment before the change.")
    before_change: Hyperparams | None = Field(default=None, description="Values to go back to when the change did harm.")


class PolicyInputs(Value):
    """Everything beside the plan that a decision depends on. Recorded with the decision, so that it can be recomputed."""

    device_asked: Literal["auto", "cpu", "cuda"]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    base: Hyperparams = Field(description="The request's own values.")
    high_watermark: float
    memory_warnings: tuple[str, ...] = Field(default=(), description="Checks of the doctor that warn of memory.")
    approval_required: bool = False
    approval: Approval = "not_asked"
    directive: ExecutiveDirective | None = None
    refusal: Refusal | None = None
    health: SegmentHealth = SegmentHealth()
    history: PolicyHistory = PolicyHistory()
    bounds: PolicyBounds = PolicyBounds()
    loss_scale_once: bool = Field(
        default=False, description="A first loss scale counts in the first segment only. False in records of older versions."
    )


BUILT_IN_BOUNDS = PolicyBounds()
HEALTHY = SegmentHealth()
NO_HISTORY = PolicyHistory()
