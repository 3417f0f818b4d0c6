"""Built-in advice: a pure function of the committed trajectory.

It sees no timing and no memory figure: both differ between a run that was killed or starved and one that was left in peace, and
advice that depends on them would end in other weights. Memory pressure is answered by the memory plan, which does not
change the mathematics. "Pressure" here is that on the gradients: norms that clipping has to cut down again and again.
"""

from pydantic import Field

from mem_core.domain.advice import TelemetrySummary, TrainingTelemetry
from mem_core.domain.directive import ExecutiveDirective
from mem_core.domain.units import Value


class RuleLimits(Value):
    """When a rule speaks, and how loudly. Factors multiply the value in force; the result is of the base schedule."""

    instability_loss_rise: float = Field(default=0.2, gt=0, description="Relative rise of the loss above the lowest recent one.")
    instability_factor: float = Field(default=0.5, gt=0, lt=1)
    instability_power_step: int = Field(default=2, ge=1, description="Steps down of the loss scale's power after skipped updates.")
    pressure_segments: int = Field(default=4, ge=1)
    pressure_ratio: float = Field(default=2.0, gt=1, description="Gradient norm ÷ clip norm that counts as pressure.")
    pressure_factor: float = Field(default=0.75, gt=0, lt=1)
    plateau_segments: int = Field(default=5, ge=2)
    plateau_improvement: float = Field(default=0.002, ge=0, description="Relative improvement below which the loss stands still.")
    plateau_factor: float = Field(default=0.5, gt=0, lt=1)


DEFAULT_LIMITS = RuleLimits()


class RulesPlanner:
    """Advice by rules, in the same form as any planner's: JSON that has to pass the parser and the policy engine."""

    def __init__(self, limits: RuleLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits

    def advise(self, summary: TelemetrySummary) -> bytes | None:
        """The rules' directive as JSON, or None."""
        directive = propose(summary.trajectory(), self.limits)
        return directive.model_dump_json(exclude_none=True).encode() if directive else None


def propose(seen: TrainingTelemetry, limits: RuleLimits = DEFAULT_LIMITS) -> ExecutiveDirective | None:
    """The first rule that fits: instability, pressure, plateau; else a change in force is kept, else nothing is asked for.

    A directive lasts for one segment, so keeping values means asking for them again.
    """
    if is_unstable(seen, limits):
        return _ask(seen, limits.instability_factor, limits.instability_power_step if seen.skipped_steps else 0)
    if is_pressed(seen, limits):
        return _ask(seen, limits.pressure_factor)
    if is_on_plateau(seen, limits):
        return _ask(seen, limits.plateau_factor)
    return None if seen.current == seen.base else _ask(seen, 1.0)


def is_unstable(seen: TrainingTelemetry, limits: RuleLimits) -> bool:
    """Updates were skipped, numbers were not finite, or the loss jumped up."""
    if seen.non_finite or seen.skipped_steps or (seen.losses and seen.losses[-1] is None):
        return True
    recent = [loss for loss in seen.losses[-limits.plateau_segments :] if loss is not None]
    return len(recent) > 1 and recent[-1] - min(recent) > limits.instability_loss_rise * abs(min(recent))


def is_pressed(seen: TrainingTelemetry, limits: RuleLimits) -> bool:
    """Gradient norms were far above the clip norm in each of the last segments. Stage 0 reports no norms: never pressed."""
    norms = seen.gradient_norms[-limits.pressure_segments :]
    if len(norms) < limits.pressure_segments or not _settled(seen, limits.pressure_segments):
        return False
    return all(norm is not None and norm > limits.pressure_ratio * seen.current.gradient_clip_norm for norm in norms)


def is_on_plateau(seen: TrainingTelemetry, limits: RuleLimits) -> bool:
    """The lowest loss of the last segments is hardly below the lowest one before them."""
    recent = [loss for loss in seen.losses[-limits.plateau_segments :] if loss is not None]
    before = [loss for loss in seen.losses[: -limits.plateau_segments] if loss is not None]
    if not before or len(recent) < limits.plateau_segments or not _settled(seen, limits.plateau_segments):
        return False
    return min(before) - min(recent) < limits.plateau_improvement * abs(min(before))


def _settled(seen: TrainingTelemetry, num_segments: int) -> bool:
    """The newest change has had time to show in all the segments that a rule looks at."""
    return seen.segments_since_change is None or seen.segments_since_change >= num_segments


def _ask(seen: TrainingTelemetry, lr_factor: float, power_step: int = 0) -> ExecutiveDirective:
    """The current values with a lower multiplier; fields that stand at the request's own value stay absent."""
    current, base, bounds = seen.current, seen.base, seen.bounds
    power = max(current.loss_scale_initial_power - power_step, bounds.loss_scale_initial_power.at_least)
    return ExecutiveDirective(
        lr_multiplier=max(current.lr_multiplier * lr_factor, bounds.lr_multiplier.at_least),
        gradient_clip_norm=None if current.gradient_clip_norm == base.gradient_clip_norm else current.gradient_clip_norm,
        loss_scale_initial_power=None if power == base.loss_scale_initial_power else power,
    )
