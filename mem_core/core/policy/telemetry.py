"""What the journal says about the committed trajectory: health for the policy engine, a summary for planners.

Losses are those of a segment's last step and skipped updates are counted from the position, so that a segment that was
interrupted and finished later looks like one done in one go. A segment that was done again counts once.
"""

from collections.abc import Iterable, Sequence

from mem_core.core.policy.history import history_for
from mem_core.core.policy.local_policy_engine import request_values
from mem_core.domain.advice import TelemetrySummary
from mem_core.domain.events import Event, PolicyDecided, SegmentEnded
from mem_core.domain.policy import LaneBounds, SegmentHealth
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.segment import SegmentCompleted


def completed_segments(events: Iterable[Event], before_segment: int) -> list[SegmentCompleted]:
    """The completed segments before `before_segment` in order; of a repeated one the newest record."""
    found: dict[int, SegmentCompleted] = {}
    for event in events:
        if isinstance(event, SegmentEnded) and isinstance(event.outcome, SegmentCompleted) and event.segment_index < before_segment:
            found[event.segment_index] = event.outcome
    return [found[index] for index in sorted(found)]


def skipped_in_last(segments: Sequence[SegmentCompleted]) -> int:
    """Skipped updates of the last segment: batches consumed beyond the applied steps, less those skipped before it."""
    totals = [segment.batch_index - segment.to_step for segment in segments[-2:]]
    return max(totals[-1] - (totals[-2] if len(totals) > 1 else 0), 0) if totals else 0


def health_for(
    events: Iterable[Event],
    segment_index: int,
    lane: LaneBounds,
    *,
    loss_mean: float | None = None,
    memory_used_fraction: float | None = None,
    ooms_absorbed: int = 0,
) -> SegmentHealth:
    """Health that the decision for `segment_index` starts from: how the segments before it went.

    `loss_mean` is the mean loss over the last segment's steps, where the caller has it: the canary is then less easily
    misled by one noisy step. The memory figures come from the caller too; they describe the machine, not the trajectory.
    """
    segments = completed_segments(events, segment_index)
    last = segments[-1].loss_last if segments else None
    spike = len(segments) > 1 and segments[-1].loss_last - segments[-2].loss_last > lane.loss_spike_increase * abs(segments[-2].loss_last)
    return SegmentHealth(
        loss_mean=loss_mean,
        loss_last=last,
        skipped_steps=skipped_in_last(segments),
        loss_spike=spike,
        ooms_absorbed=ooms_absorbed,
        memory_used_fraction=memory_used_fraction,
    )


def summary_for(
    events: Sequence[Event],
    segment_index: int,
    request: RuntimeRequest,
    lane: LaneBounds,
    *,
    gradient_norms: Sequence[float | None] = (),
    memory_headroom_fraction: float | None = None,
    ooms_absorbed: int = 0,
    tokens_per_s: float | None = None,
    learning_rate: float | None = None,
    validation_loss: float | None = None,
) -> TelemetrySummary:
    """What a planner is told before `segment_index`. `gradient_norms` is one number per segment, oldest first."""
    segments = completed_segments(events, segment_index)
    base = request_values(request)
    return TelemetrySummary(
        segment_index=segment_index,
        applied_steps=segments[-1].to_step if segments else 0,
        max_steps=request.training.max_steps,
        losses=tuple(segment.loss_last for segment in segments),
        gradient_norms=tuple(gradient_norms),
        skipped_steps=skipped_in_last(segments),
        segments_since_change=segments_since_change(events, segment_index),
        learning_rate=learning_rate,
        current=history_for(events, segment_index).current or base,
        base=base,
        bounds=lane,
        validation_loss=validation_loss,
        memory_headroom_fraction=memory_headroom_fraction,
        ooms_absorbed=ooms_absorbed,
        tokens_per_s=tokens_per_s,
    )


def segments_since_change(events: Iterable[Event], segment_index: int) -> int | None:
    """How many segments before `segment_index` ran with the values of the newest change; None where nothing ever changed."""
    decisions = {
        event.segment_index: event.decision.applied_hyperparams
        for event in events
        if isinstance(event, PolicyDecided) and event.segment_index < segment_index
    }
    indices = sorted(decisions)
    for before, after in zip(reversed(indices[:-1]), reversed(indices[1:]), strict=True):
        if decisions[before] != decisions[after]:
            return segment_index - after
    return None
