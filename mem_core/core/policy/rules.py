"""The policy as one pure function, `decide`: a list of small gates, each of which may only lower, hold or refuse."""

import math
from dataclasses import dataclass, replace

from mem_core.domain.directive import ExecutiveDirective, Refusal
from mem_core.domain.plan import CandidatePlan, Hyperparams, MemoryPlan
from mem_core.domain.policy import Clamp, IntegerBound, LaneBounds, NumberBound, PolicyDecision, PolicyInputs

LOSS_SCALE = "loss_scale_initial_power"
FIELDS = ("lr_multiplier", "gradient_clip_norm", LOSS_SCALE)


@dataclass(frozen=True)
class Draft:
    """A decision in the making. Gates pass it on; none of them turns a refusal back into a permission."""

    values: Hyperparams
    reason: str
    allow: bool = True
    detail: str = ""
    clamps: tuple[Clamp, ...] = ()
    proposed: Hyperparams | None = None


def decide(inputs: PolicyInputs, plan: CandidatePlan) -> PolicyDecision:
    """The decision for the segment of `plan`. Pure and total: no time, no randomness, and no input that raises."""
    if inputs.device_asked == "cuda" and inputs.device != "cuda":
        return _cuda_unavailable(inputs)
    lane = inputs.bounds.of(inputs.device)
    draft = _hold_after_instability(_approve(_propose(inputs, plan, lane), inputs), inputs)
    memory, memory_clamps = gate_memory(plan.memory, inputs)
    directive = inputs.directive
    return PolicyDecision(
        allow=draft.allow,
        reason=draft.reason,
        detail=draft.detail,
        lane=lane.lane,
        applied_hyperparams=draft.values,
        clamps=draft.clamps + memory_clamps,
        not_applicable=_not_applicable(inputs, plan),
        directive=directive.model_dump(exclude_none=True) if directive else None,
        proposed_hyperparams=draft.proposed,
        applied_memory=memory,
    )


def _cuda_unavailable(inputs: PolicyInputs) -> PolicyDecision:
    return PolicyDecision(
        allow=False,
        reason="cuda_unavailable",
        detail="device: cuda was asked for and this machine has no usable CUDA device; use device: cpu or auto, or another machine",
        lane=inputs.bounds.cuda.lane,
        applied_hyperparams=inputs.base,
        request_refused=True,
    )


def current_values(inputs: PolicyInputs) -> Hyperparams:
    """The values in force now: those of the last segment, before the first one the request's own."""
    return inputs.history.current or inputs.base


def _propose(inputs: PolicyInputs, plan: CandidatePlan, lane: LaneBounds) -> Draft:
    """What the segment would get before approval and health: revert, refusal, default, or the clamped directive."""
    if harm := canary_harm(inputs, lane):
        return Draft(inputs.history.before_change or inputs.base, "canary_reverted", detail=harm)
    if inputs.refusal is not None:
        return Draft(inputs.base, inputs.refusal.reason, allow=False, detail=inputs.refusal.detail)
    if inputs.directive is None:
        return Draft(inputs.base, "no_directive")
    draft = clamp_directive(inputs.directive, inputs.base, lane)
    if _loss_scale_is_set(inputs, plan):
        draft = _keep_loss_scale(draft, inputs.directive, inputs.base)
    return _cool_down(draft, inputs, plan)


def canary_harm(inputs: PolicyInputs, lane: LaneBounds) -> str:
    """Why the newest change is to be reverted, or an empty text. A change is watched over the lane's canary segments."""
    history, health = inputs.history, inputs.health
    if history.canary_until_segment is None:
        return ""
    if health.non_finite:
        return "the change led to numbers that are not finite"
    before, after = history.canary_baseline_loss, health.loss
    if before is None or after is None or after - before <= lane.canary_max_loss_increase * abs(before):
        return ""
    return f"loss went from {before!r} to {after!r}, more than the {lane.canary_max_loss_increase!r} (relative) allowed"


def directive_problem(directive: ExecutiveDirective) -> Refusal | None:
    """What is wrong with a directive that was built around its own validation.

    Types and finiteness come before any comparison, since min(nan, 0.85) is nan.
    """
    for name in FIELDS:
        value: object = getattr(directive, name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if name == FIELDS[2] else int | float):
            return Refusal(reason="wrong_type", detail=f"{name} is not a number of the right kind")
        if not is_finite(value):
            return Refusal(reason="non_finite", detail=f"{name} is not a finite number")
    return None


def is_finite(value: float | int) -> bool:
    """Finite as a float: an integer beyond the range of floats is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def clamp_directive(directive: ExecutiveDirective, base: Hyperparams, lane: LaneBounds) -> Draft:
    """Each proposed number moved into its bound; absent ones are the request's own. Multipliers are of the base schedule."""
    lr, lr_clamp = _clamp("lr_multiplier", directive.lr_multiplier, base.lr_multiplier, lane.lr_multiplier)
    norm, norm_clamp = _clamp("gradient_clip_norm", directive.gradient_clip_norm, base.gradient_clip_norm, lane.gradient_clip_norm)
    power, power_clamp = _clamp(
        "loss_scale_initial_power", directive.loss_scale_initial_power, base.loss_scale_initial_power, lane.loss_scale_initial_power
    )
    values = Hyperparams(lr_multiplier=float(lr), gradient_clip_norm=float(norm), loss_scale_initial_power=int(power))
    clamps = lr_clamp + norm_clamp + power_clamp
    return Draft(values, "clamped" if clamps else "accepted", clamps=clamps)


def _loss_scale_is_set(inputs: PolicyInputs, plan: CandidatePlan) -> bool:
    """An engine takes a first loss scale when it is built; from then on it adjusts it by itself, and a checkpoint brings it along."""
    return inputs.loss_scale_once and plan.from_step > 0


def _keep_loss_scale(draft: Draft, directive: ExecutiveDirective, base: Hyperparams) -> Draft:
    """A proposal that no engine would notice is recorded as not taken, never as applied."""
    name, proposed, kept = LOSS_SCALE, directive.loss_scale_initial_power, base.loss_scale_initial_power
    if proposed is None:
        return draft
    clamps = tuple(clamp for clamp in draft.clamps if clamp.field != name)
    if proposed != kept:
        clamps += (_clamped(name, proposed, kept, f"the first one ({kept}) was set when training began", "loss_scale_set"),)
    values = draft.values.model_copy(update={name: kept})
    return replace(draft, values=values, clamps=clamps, reason="clamped" if clamps else "accepted")


def _clamp(name: str, proposed: float | None, base: float, bound: NumberBound | IntegerBound) -> tuple[float, tuple[Clamp, ...]]:
    if proposed is None:
        return base, ()
    if proposed > bound.at_most:
        return bound.at_most, (_clamped(name, proposed, bound.at_most, f"at most {bound.at_most}", "above_bound"),)
    if proposed < bound.at_least:
        return bound.at_least, (_clamped(name, proposed, bound.at_least, f"at least {bound.at_least}", "below_bound"),)
    return proposed, ()


def _clamped(name: str, proposed: float, applied: float, bound: str, reason: str) -> Clamp:
    return Clamp(field=name, proposed=float(proposed), applied=float(applied), bound=bound, reason=reason)


def _cool_down(draft: Draft, inputs: PolicyInputs, plan: CandidatePlan) -> Draft:
    """Within the cool-down the current values stay; only after instability may a lower value be taken at once."""
    until = inputs.history.cool_down_until_segment
    current = current_values(inputs)
    if plan.segment_index >= until or draft.values == current:
        return draft
    held = _hold(draft, current, f"no change before segment {until}", "cool_down", keep_lower=inputs.health.unstable)
    return held if held is draft else replace(held, reason="cool_down", detail=f"values change again from segment {until} on")


def _approve(draft: Draft, inputs: PolicyInputs) -> Draft:
    """A person confirms changes that a planner made; going back to the request's own or to the current values needs nobody."""
    changed = draft.values not in (inputs.base, current_values(inputs))
    if not (inputs.approval_required and changed and draft.allow) or draft.reason == "canary_reverted" or inputs.approval == "granted":
        return draft
    words = {"refused": "approval_refused", "timed_out": "approval_timed_out"}
    reason = words.get(inputs.approval, "approval_required")
    detail = "a person has to approve changed values (policy.approval.required); without that the request's own hold"
    return Draft(inputs.base, reason, allow=False, detail=detail, proposed=draft.values)


def _hold_after_instability(draft: Draft, inputs: PolicyInputs) -> Draft:
    """After instability nothing goes above its current value: not by advice, and not by going back to the default."""
    if not inputs.health.unstable:
        return draft
    return _hold(draft, current_values(inputs), "at most the current value", "instability", keep_lower=True)


def _hold(draft: Draft, current: Hyperparams, bound: str, reason: str, *, keep_lower: bool) -> Draft:
    """Replace values by the current ones (only those above, with `keep_lower`), each with a clamp that says why."""
    values, clamps = draft.values, draft.clamps
    for name in FIELDS:
        wanted, now = getattr(values, name), getattr(current, name)
        if wanted == now or (keep_lower and wanted < now):
            continue
        values = values.model_copy(update={name: now})
        first = next((clamp.proposed for clamp in clamps if clamp.field == name), float(wanted))
        clamps = (*(clamp for clamp in clamps if clamp.field != name), _clamped(name, first, now, f"{bound} ({now})", reason))
    if values == draft.values:
        return draft
    return replace(draft, values=values, clamps=clamps, reason="clamped" if draft.reason == "accepted" else draft.reason)


def _not_applicable(inputs: PolicyInputs, plan: CandidatePlan) -> tuple[str, ...]:
    directive = inputs.directive
    if directive is None or directive.loss_scale_initial_power is None:
        return ()
    return (LOSS_SCALE,) if inputs.dtype != "float16" or _loss_scale_is_set(inputs, plan) else ()


def memory_pressure(inputs: PolicyInputs) -> bool:
    """Whether the last segment or the doctor says that memory is short."""
    used = inputs.health.memory_used_fraction
    return bool(inputs.health.ooms_absorbed or inputs.memory_warnings or (used is not None and used >= inputs.high_watermark))


def gate_memory(plan: MemoryPlan, inputs: PolicyInputs) -> tuple[MemoryPlan, tuple[Clamp, ...]]:
    """Under memory pressure no part of the memory plan may ask for more than the current plan does."""
    current = inputs.history.current_memory
    if current is None or not memory_pressure(inputs):
        return plan, ()
    lower = MemoryPlan(
        micro_batch_rows=_tighter(plan.micro_batch_rows, current.micro_batch_rows),
        micro_batch_tokens=_tighter(plan.micro_batch_tokens, current.micro_batch_tokens),
        activation_checkpointing=plan.activation_checkpointing or current.activation_checkpointing,
        offload_optimizer="cpu" if "cpu" in (plan.offload_optimizer, current.offload_optimizer) else "none",
    )
    return lower, tuple(_memory_clamps(plan, lower))


def _tighter(wanted: int, now: int) -> int:
    """The smaller of two limits, where 0 means no limit."""
    return min(wanted, now) if wanted and now else wanted or now


def _memory_clamps(wanted: MemoryPlan, applied: MemoryPlan) -> list[Clamp]:
    pairs = {
        "micro_batch_rows": (wanted.micro_batch_rows, applied.micro_batch_rows),
        "micro_batch_tokens": (wanted.micro_batch_tokens, applied.micro_batch_tokens),
        "activation_checkpointing": (int(wanted.activation_checkpointing), int(applied.activation_checkpointing)),
        "offload_optimizer": (int(wanted.offload_optimizer == "cpu"), int(applied.offload_optimizer == "cpu")),
    }
    return [
        _clamped(f"memory.{name}", before, after, f"no more memory than now ({after})", "memory_pressure")
        for name, (before, after) in pairs.items()
        if before != after
    ]
