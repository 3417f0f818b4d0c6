"""What a decision means for the next ones: a fold over the recorded decisions, so that resume and replay see the same history."""

from collections.abc import Iterable

from mem_core.core.policy.rules import current_values
from mem_core.domain.events import Event, PolicyDecided
from mem_core.domain.policy import NO_HISTORY, PolicyDecision, PolicyHistory, PolicyInputs


def advance(inputs: PolicyInputs, decision: PolicyDecision, segment_index: int) -> PolicyHistory:
    """The history after `decision` was taken for `segment_index`."""
    if decision.request_refused:
        return inputs.history
    lane, before, applied = inputs.bounds.of(inputs.device), current_values(inputs), decision.applied_hyperparams
    kept = inputs.history.model_copy(update={"current": applied, "current_memory": decision.applied_memory})
    if decision.reason == "canary_reverted":
        return _without_canary(kept, cool_down_until_segment=segment_index + 1 + lane.revert_cool_down_segments)
    if applied == before:
        until = kept.canary_until_segment
        return kept if until is not None and segment_index < until else _without_canary(kept)
    if applied == inputs.base:
        return _without_canary(kept)
    return kept.model_copy(
        update={
            "cool_down_until_segment": segment_index + 1 + lane.cool_down_segments,
            "canary_until_segment": segment_index + lane.canary_segments if lane.canary_segments else None,
            "canary_baseline_loss": inputs.health.loss,
            "before_change": before,
        }
    )


def _without_canary(history: PolicyHistory, **update: int) -> PolicyHistory:
    nothing = {"canary_until_segment": None, "canary_baseline_loss": None, "before_change": None}
    return history.model_copy(update={**nothing, **update})


def history_for(events: Iterable[Event], segment_index: int) -> PolicyHistory:
    """The history that the decision for `segment_index` starts from: that left by the newest earlier recorded decision.

    Raises:
        pydantic.ValidationError: a recorded decision lacks its inputs.
    """
    last: PolicyDecided | None = None
    for event in events:
        if isinstance(event, PolicyDecided) and event.segment_index < segment_index:
            last = event
    return advance(PolicyInputs.model_validate(last.inputs), last.decision, last.segment_index) if last else NO_HISTORY


def recorded_decision(events: Iterable[Event], segment_index: int) -> PolicyDecision | None:
    """The decision already taken for a segment: replayed, never taken anew, when the segment is done again. The newest counts."""
    found: PolicyDecision | None = None
    for event in events:
        if isinstance(event, PolicyDecided) and event.segment_index == segment_index:
            found = event.decision
    return found
