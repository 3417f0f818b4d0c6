"""What is next: one pure function from state and outcome to an action. Every bound on retries is here."""

from dataclasses import dataclass
from typing import Literal, assert_never

from mem_core.domain.errors import InternalError, MemError, MemoryExhausted, NoProgress, StoreUnavailable
from mem_core.domain.segment import (
    Hung,
    NonFinite,
    OutOfMemory,
    SaveFailed,
    SegmentCompleted,
    SegmentFailure,
    SegmentInterrupted,
    SegmentOutcome,
    WorkerError,
    WorkerLost,
    describe_failure,
)
from mem_core.domain.units import Value

BACK_OFF_S = (0.0, 1.0, 5.0, 15.0)


class Limits(Value):
    """The bounds that the request sets on going on."""

    max_steps: int
    segment_steps: int
    max_failures_without_progress: int
    memory_mode: Literal["adaptive", "fixed"] = "adaptive"


class Progress(Value):
    """Where the run stands, as far as the next action depends on it.

    `failures_without_progress` counts failed tries since the validated step last advanced, this one included (I8);
    `same_batch_failures` those of them that failed at one and the same batch in the same way.
    """

    applied_steps: int
    validated_step: int | None
    failures_without_progress: int = 0
    same_batch_failures: int = 0
    can_shrink: bool = True


@dataclass(frozen=True)
class Train:
    """Train one segment."""

    segment_index: int
    from_step: int
    until_step: int


@dataclass(frozen=True)
class Retry:
    """Replace the workers, go back to the last validated step, shrink first where memory was the cause."""

    delay_s: float
    reason: str
    shrink: bool = False


@dataclass(frozen=True)
class Finish:
    """All steps are applied."""


@dataclass(frozen=True)
class Pause:
    """Interrupted on purpose; the same command goes on."""

    by: str


@dataclass(frozen=True)
class GiveUp:
    """End with this error."""

    error: MemError


Action = Train | Retry | Finish | Pause | GiveUp


def next_action(progress: Progress, outcome: SegmentOutcome | None, limits: Limits) -> Action:
    """Decide what follows. `outcome` is that of the last segment; None at the start of an attempt."""
    match outcome:
        case None | SegmentCompleted():
            return _go_on(progress, limits)
        case SegmentInterrupted():
            return Pause(outcome.by)
        case OutOfMemory() | WorkerLost() | Hung() | NonFinite() | WorkerError() | SaveFailed():
            return _after_failure(progress, outcome, limits)
    assert_never(outcome)


def _go_on(progress: Progress, limits: Limits) -> Action:
    if progress.applied_steps >= limits.max_steps:
        return Finish()
    index = progress.applied_steps // limits.segment_steps
    until = min(limits.max_steps, (index + 1) * limits.segment_steps)
    return Train(segment_index=index, from_step=progress.applied_steps, until_step=until)


def _after_failure(progress: Progress, failure: SegmentFailure, limits: Limits) -> Action:
    text = describe_failure(failure)
    tries = progress.failures_without_progress
    if isinstance(failure, OutOfMemory) and limits.memory_mode == "fixed":
        return GiveUp(
            MemoryExhausted(
                f"{text}; memory.mode is fixed, so nothing was shrunk",
                remedy="Set memory.mode: adaptive, a smaller memory.micro_batch_size, or a smaller data.sequence_length.",
            )
        )
    if isinstance(failure, OutOfMemory) and not progress.can_shrink and tries > 1:
        return GiveUp(MemoryExhausted(f"{text}, and no smaller plan is left", remedy="See the doctor's estimate for what would fit."))
    if tries > limits.max_failures_without_progress:
        return GiveUp(_no_progress(progress, failure, text, limits))
    delay_s = 0.0 if tries <= 1 else BACK_OFF_S[min(tries - 1, len(BACK_OFF_S) - 1)]
    return Retry(delay_s=delay_s, reason=text, shrink=isinstance(failure, OutOfMemory))


def _no_progress(progress: Progress, failure: SegmentFailure, text: str, limits: Limits) -> MemError:
    where = f"validated step {progress.validated_step or 0} did not advance over {limits.max_failures_without_progress} restarts"
    if isinstance(failure, SaveFailed):
        return StoreUnavailable(f"{text}; {where}", remedy="Free space or repair the store, then give the same command again.")
    if isinstance(failure, WorkerError) and progress.same_batch_failures == 0 and failure.evidence.phase == "start":
        return InternalError(f"{text}; {where}", remedy="Read logs/rank-*.log in the run folder and report it.")
    batch = f" Batch {failure.evidence.batch_index} failed each time." if progress.same_batch_failures > 1 else ""
    samples = f" Its samples: {list(failure.sample_ids)}." if isinstance(failure, NonFinite) and failure.sample_ids else ""
    return NoProgress(
        f"{text}; {where}.{batch}{samples}".rstrip("."),
        remedy="Read the last lines above and logs/rank-*.log in the run folder, mend the cause, then give the same command again.",
    )
