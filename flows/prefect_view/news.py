"""From a journal line to what is told at once: custom events for automations, one summary line per segment for the log. Pure."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mem_core.domain.events import CheckpointJudged, FaultMet, JournalLine, PolicyDecided, RunEnded, SegmentEnded
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted, describe_failure
from mem_core.domain.units import format_bytes, format_seconds


@dataclass(frozen=True)
class MemEvent:
    """A custom event of Prefect's feed; automations match its name and payload."""

    name: Literal["mem.checkpoint.validated", "mem.checkpoint.rejected", "mem.fault", "mem.policy.refused", "mem.run.finished"]
    payload: dict[str, Any] = field(default_factory=dict[str, Any])


def event_of(line: JournalLine) -> MemEvent | None:
    """The event that a line is worth, if any."""
    match line.event:
        case CheckpointJudged(verdict=verdict):
            name = "mem.checkpoint.validated" if verdict.valid else "mem.checkpoint.rejected"
            return MemEvent(name, {"step": verdict.step, "level": verdict.level, "reasons": list(verdict.reasons)})
        case FaultMet() as fault:
            return MemEvent("mem.fault", {"kind": fault.kind, "step": fault.step, "detail": fault.detail[:500]})
        case PolicyDecided() as decided if not decided.decision.allow:
            payload = {"segment_index": decided.segment_index, "reason": decided.decision.reason, "detail": decided.decision.detail[:500]}
            return MemEvent("mem.policy.refused", payload)
        case RunEnded() as end:
            return MemEvent("mem.run.finished", {"status": end.status, "exit_code": end.exit_code, "message": end.message[:500]})
        case _:
            return None


def log_line(line: JournalLine) -> tuple[Literal["info", "warning"], str] | None:
    """One record for the flow run's log: a summary per segment, the workers' last lines where a segment failed."""
    event = line.event
    if not isinstance(event, SegmentEnded):
        return None
    outcome = event.outcome
    if isinstance(outcome, SegmentCompleted):
        return "info", _summary(event.segment_index, outcome)
    if isinstance(outcome, SegmentInterrupted):
        return "info", f"segment {event.segment_index}: interrupted by {outcome.by} at step {outcome.to_step:,}"
    lines = outcome.evidence.last_lines
    tail = "\nlast lines of the worker:\n" + "\n".join(f"  {text}" for text in lines[-20:]) if lines else ""
    return "warning", f"segment {event.segment_index}: {describe_failure(outcome)}{tail}"[:8_000]


def _summary(index: int, outcome: SegmentCompleted) -> str:
    rate = f", {outcome.tokens / outcome.duration_s:,.0f} tokens/s" if outcome.duration_s > 0 else ""
    peak = f", peak {format_bytes(outcome.peak_bytes)}" if outcome.peak_bytes else ""
    skipped = f", {outcome.skipped_steps} skipped" if outcome.skipped_steps else ""
    return (
        f"segment {index}: steps {outcome.from_step:,} to {outcome.to_step:,} in {format_seconds(outcome.duration_s)}, "
        f"loss {outcome.loss_first:.4f} to {outcome.loss_last:.4f}{rate}{peak}{skipped}"
    )
