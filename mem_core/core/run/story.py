"""What a run's journal tells, in lines for people: one for each event that matters to somebody who looks in."""

import time

from mem_core.domain.events import (
    AttemptStarted,
    BatchSkipped,
    CheckpointJudged,
    CheckpointMirrored,
    CheckpointRemoved,
    DataPrepared,
    Evaluated,
    Event,
    Exported,
    FaultMet,
    Forked,
    JournalLine,
    MemoryPlanChanged,
    Noted,
    OomAbsorbed,
    PolicyDecided,
    Recovered,
    Resumed,
    RunEnded,
    RunStoppedEarly,
    Sampled,
    SegmentEnded,
    SegmentStarted,
)
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.results.evaluation import rows_words
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted, SegmentOutcome, describe_failure
from mem_core.domain.units import format_bytes, format_seconds


def story_line(line: JournalLine) -> str | None:
    """`2026-11-30 18:04:25  segment 2 done: ...` in local time; None for bookkeeping that no reader waits for."""
    words = event_words(line.event)
    if words is None:
        return None
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(line.time_unix_s))}  {words}"


def event_words(event: Event) -> str | None:
    """One line without its time; None where there is nothing to tell."""
    match event:
        case AttemptStarted() | Resumed() | RunEnded() | DataPrepared() | Noted():
            return _of_attempt(event)
        case Forked(origin=origin):
            return f"{origin.words()}: {origin.changes()}"
        case SegmentStarted() | SegmentEnded() | Evaluated() | BatchSkipped() | PolicyDecided():
            return _of_training(event)
        case CheckpointJudged() | CheckpointRemoved() | CheckpointMirrored():
            return _of_checkpoint(event)
        case MemoryPlanChanged() | OomAbsorbed() | FaultMet() | Recovered():
            return _of_trouble(event)
        case Sampled(found=found):
            return found.words()
        case RunStoppedEarly(stopped=stopped):
            return f"stopped early after step {stopped.step:,}: {stopped.metric} no longer falls"
        case Exported(summary=summary):
            return f"model folder of step {summary.step:,}: {summary.folder}" if summary.folder else f"no model folder: {summary.problem}"
        case _:
            return None


def _of_attempt(event: AttemptStarted | Resumed | RunEnded | DataPrepared | Noted) -> str:
    match event:
        case AttemptStarted():
            return f"attempt {event.attempt} begins: process {event.pid} on {event.host}{f' ({event.note})' if event.note else ''}"
        case Resumed():
            return f"goes on from step {event.step:,}"
        case DataPrepared():
            data = event.data
            bad = f", {data.num_bad_rows:,} bad rows left out" if data.num_bad_rows else ""
            return f"data ready: {data.num_sequences:,} rows, {data.num_tokens:,} tokens of {data.num_files:,} files{bad}"
        case Noted():
            return f"note: {event.text}"
        case RunEnded():
            return f"{event.status}, exit {event.exit_code}{f': {event.message}' if event.message else ''}"


def _of_training(event: SegmentStarted | SegmentEnded | Evaluated | BatchSkipped | PolicyDecided) -> str | None:
    match event:
        case SegmentStarted():
            again = f", try {event.try_number}" if event.try_number > 1 else ""
            return f"segment {event.segment_index} begins: steps {event.from_step:,} to {event.until_step:,}{again}"
        case SegmentEnded():
            return _segment_end(event.segment_index, event.outcome)
        case Evaluated():
            if event.sets:
                figures = "; ".join(f"{name} {found.words()}" for name, found in event.sets.items())
                return f"held-out rows after step {event.step:,}: {figures}"
            words = rows_words(event.validation_rows, event.validation_rows_total)
            return f"validation loss {event.validation_loss:.4f} at step {event.step:,}{f' over {words}' if words else ''}"
        case BatchSkipped():
            return f"batch {event.batch_index:,} is left out from now on{f': {event.reason}' if event.reason else ''}"
        case PolicyDecided(decision=decision):
            if decision.directive is None and decision.allow:
                return None  # nobody advised anything: most segments of most runs
            taken = "taken" if decision.allow else "refused"
            return f"policy: the planner's advice for segment {event.segment_index} is {taken} ({decision.reason})"


def _segment_end(index: int, outcome: SegmentOutcome) -> str:
    match outcome:
        case SegmentCompleted():
            rate = f" at {outcome.tokens / outcome.duration_s:,.0f} tokens/s" if outcome.duration_s > 0 else ""
            loss = f"loss {outcome.loss_first:.4f} to {outcome.loss_last:.4f}"
            peak = f", peak {format_bytes(outcome.peak_bytes)}" if outcome.peak_bytes else ""
            return f"segment {index} done: step {outcome.to_step:,} in {format_seconds(outcome.duration_s)}{rate}, {loss}{peak}"
        case SegmentInterrupted():
            return f"segment {index} stopped at step {outcome.to_step:,} by {outcome.by}"
        case _:
            return f"segment {index} failed: {describe_failure(outcome)}"


def _of_checkpoint(event: CheckpointJudged | CheckpointRemoved | CheckpointMirrored) -> str:
    match event:
        case CheckpointJudged(verdict=verdict):
            why = f": {'; '.join(verdict.reasons)}" if verdict.reasons else ""
            return f"checkpoint {verdict.step:,} {'proven' if verdict.valid else 'REJECTED'}{why}"
        case CheckpointRemoved():
            return f"checkpoint {event.step:,} removed: {event.reason}"
        case CheckpointMirrored():
            if event.problem:
                return f"checkpoint {event.step:,} has no remote copy: {event.problem}"
            return f"checkpoint {event.step:,} copied to {event.url}"


def _of_trouble(event: MemoryPlanChanged | OomAbsorbed | FaultMet | Recovered) -> str:
    match event:
        case MemoryPlanChanged():
            plan = event.change.plan
            return f"memory: {_plan_words(plan)} a pass from batch {event.change.batch_index:,} on: {event.change.reason}"
        case OomAbsorbed():
            return f"out of {event.memory} memory at batch {event.batch_index:,} in {event.phase}, absorbed"
        case FaultMet():
            return f"FAULT {event.kind}: {event.detail or 'no detail'}; going on from step {event.step:,}"
        case Recovered():
            return f"recovered from {event.kind} at step {event.step:,} in {format_seconds(event.recovered_s)}"


def _plan_words(plan: MemoryPlan) -> str:
    rows = f"{plan.micro_batch_rows:,} rows" if plan.micro_batch_rows else "any rows"
    return f"{rows}{f' of {plan.micro_batch_tokens:,} tokens together' if plan.micro_batch_tokens else ''}"
