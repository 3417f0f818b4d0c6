"""Decisions in words, and as rows of a table."""

from collections.abc import Iterable
from typing import Any

from mem_core.domain.events import PolicyDecided
from mem_core.domain.plan import Hyperparams
from mem_core.domain.policy import Clamp, PolicyDecision

_REASONS = {
    "accepted": "the advice was taken as it was",
    "clamped": "the advice was taken within the bounds",
    "no_directive": "there was no advice, so the request's own values hold",
    "cool_down": "values changed not long ago, so they stay",
    "canary_reverted": "the newest change did harm and was taken back",
    "approval_required": "a person has to approve the change, so the request's own values hold",
    "approval_refused": "a person refused the change, so the request's own values hold",
    "approval_timed_out": "no person answered in time, so the request's own values hold",
    "cuda_unavailable": "CUDA was asked for and is not there",
}
_CLAMPS = {
    "above_bound": "above its bound",
    "below_bound": "below its bound",
    "cool_down": "held during the cool-down",
    "instability": "not raised after instability",
    "memory_pressure": "not raised under memory pressure",
    "loss_scale_set": "not taken any more",
}


def explain_decision(decision: PolicyDecision) -> str:
    """A few lines for people: what was decided, what was asked, what applies, and why each value changed."""
    lines = [f"{'allowed' if decision.allow else 'refused'} in lane {decision.lane}: {_reason(decision)}"]
    if decision.directive is not None:
        asked = ", ".join(f"{name} {value}" for name, value in decision.directive.items()) or "nothing"
        lines.append(f"  asked for: {asked}")
    lines.append(f"  applied:   {_values(decision.applied_hyperparams)}")
    lines += [f"  changed:   {_clamp(clamp)}" for clamp in decision.clamps]
    lines += [f"  note:      {name} {_no_effect(decision, name)}" for name in decision.not_applicable]
    return "\n".join(lines)


def _no_effect(decision: PolicyDecision, name: str) -> str:
    set_before = any(clamp.field == name and clamp.reason == "loss_scale_set" for clamp in decision.clamps)
    return "has no effect once training has begun" if set_before else "has no effect without float16"


def _reason(decision: PolicyDecision) -> str:
    known = _REASONS.get(decision.reason)
    words = known or f"the reply was refused as a whole ({decision.reason}), so the request's own values hold"
    return f"{words}. {decision.detail}".rstrip(". ")


def _values(values: Hyperparams) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.model_dump().items())


def _clamp(clamp: Clamp) -> str:
    return f"{clamp.field} {clamp.proposed:g} -> {clamp.applied:g}, {_CLAMPS.get(clamp.reason, clamp.reason)} ({clamp.bound})"


def explain_decisions(events: Iterable[PolicyDecided]) -> str:
    """Every decision of a run in order."""
    return "\n".join(
        f"segment {event.segment_index} (steps {event.plan.from_step} to {event.plan.until_step}): {explain_decision(event.decision)}"
        for event in events
    )


def decision_rows(events: Iterable[PolicyDecided]) -> list[dict[str, Any]]:
    """One row per decision for a table: short, plain values."""
    return [
        {
            "segment": event.segment_index,
            "from_step": event.plan.from_step,
            "allow": event.decision.allow,
            "reason": event.decision.reason,
            **event.decision.applied_hyperparams.model_dump(),
            "clamps": "; ".join(_clamp(clamp) for clamp in event.decision.clamps),
        }
        for event in events
    ]
