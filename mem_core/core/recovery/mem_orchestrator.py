"""`MemOrchestrator`: from progress and outcome to the next action, purely. Every bound on retries is here."""

from dataclasses import dataclass
from typing import Literal, assert_never

from mem_core.domain.errors import InternalError, MemError, MemoryExhausted, NoProgress, StoreUnavailable
from mem_core.domain.request import RuntimeRequest
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
SUSPECT_AFTER = 2  # failures of the same kind at the same batch make the batch itself the suspect
OnNonFinite = Literal["retry", "skip", "lower_lr", "fail"]


class Progress(Value):
    """Where the run stands, as far as the next action depends on it.

    `failures_without_progress` counts failed tries since the validated step last advanced, this one included (I8);
    `same_batch_failures` those of them that failed at one and the same batch in the same way. `sample_ids` are those of the batch
    that failed last, `skipped_batches` how many the user's choice has left out so far. `stop_by`: who asks for an end, in words.
    """

    applied_steps: int
    validated_step: int | None
    failures_without_progress: int = 0
    same_batch_failures: int = 0
    can_shrink: bool = True
    can_defragment: bool = False
    sample_ids: tuple[int, ...] = ()
    skipped_batches: int = 0
    stop_by: str = ""


@dataclass(frozen=True)
class Train:
    """Train one segment."""

    segment_index: int
    from_step: int
    until_step: int


@dataclass(frozen=True)
class Retry:
    """Replace the workers, go back to the last validated step, shrink first where memory was the cause.

    `defragment` asks for another setting of the device's allocator instead: memory was in pieces, not too little.
    `skip_batch` leaves a batch out for good, recorded before the next try; `lower_lr` asks the policy engine for less.
    """

    delay_s: float
    reason: str
    shrink: bool = False
    defragment: bool = False
    skip_batch: int | None = None
    lower_lr: bool = False


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


class MemOrchestrator(Value):
    """Decides what a run does next, within the bounds that its request sets on going on.

    A frozen value: the same bounds, progress and outcome give the same action for ever, whoever asks and how often.
    """

    max_steps: int
    segment_steps: int
    max_failures_without_progress: int
    memory_mode: Literal["adaptive", "fixed"] = "adaptive"
    on_poisoned_batch: Literal["fail", "skip"] = "fail"
    on_non_finite: OnNonFinite = "retry"
    max_skipped_batches: int = 100

    @classmethod
    def of(cls, request: RuntimeRequest) -> "MemOrchestrator":
        """The bounds that a request sets."""
        resilience = request.resilience
        return cls(
            max_steps=request.training.max_steps,
            segment_steps=request.effective_segment_steps,
            max_failures_without_progress=resilience.max_failures_without_progress,
            memory_mode=request.memory.mode,
            on_poisoned_batch=resilience.on_poisoned_batch,
            on_non_finite=resilience.on_non_finite,
            max_skipped_batches=resilience.max_skipped_batches,
        )

    def next_action(self, progress: Progress, outcome: SegmentOutcome | None) -> Action:
        """Decide what follows. `outcome` is that of the last segment; None at the start of an attempt."""
        match outcome:
            case None | SegmentCompleted():
                return _go_on(progress, self)
            case SegmentInterrupted():
                return Pause(outcome.by)
            case OutOfMemory() | WorkerLost() | Hung() | NonFinite() | WorkerError() | SaveFailed():
                return _after_failure(progress, outcome, self)
        assert_never(outcome)


def _go_on(progress: Progress, limits: MemOrchestrator) -> Action:
    if progress.applied_steps >= limits.max_steps:
        return Finish()  # whoever asked for an end gets the best one
    if progress.stop_by:
        return Pause(progress.stop_by)
    index = progress.applied_steps // limits.segment_steps
    until = min(limits.max_steps, (index + 1) * limits.segment_steps)
    return Train(segment_index=index, from_step=progress.applied_steps, until_step=until)


def _after_failure(progress: Progress, failure: SegmentFailure, limits: MemOrchestrator) -> Action:
    text = describe_failure(failure)
    tries = progress.failures_without_progress
    if progress.can_defragment:
        return Retry(delay_s=0.0, reason=text, defragment=True)  # once: then the new workers have the setting
    if isinstance(failure, OutOfMemory) and limits.memory_mode == "fixed":
        return GiveUp(
            MemoryExhausted(
                f"{text}; memory.mode is fixed, so nothing was shrunk",
                remedy="Set memory.mode: adaptive, a smaller memory.micro_batch_size, or a smaller data.sequence_length.",
            )
        )
    if isinstance(failure, OutOfMemory) and not progress.can_shrink and tries > 1 and progress.same_batch_failures > 1:
        return GiveUp(MemoryExhausted(f"{text}, and no smaller plan is left", remedy="See the doctor's estimate for what would fit."))
    if isinstance(failure, NonFinite) and limits.on_non_finite == "fail":
        return GiveUp(_poisoned(progress, failure, text, "resilience.on_non_finite is fail"))
    skip = _batch_to_skip(progress, failure, limits)
    if skip is not None and progress.skipped_batches >= limits.max_skipped_batches:
        bound = f"{progress.skipped_batches} batches have been skipped, as many as resilience.max_skipped_batches allows"
        return GiveUp(_poisoned(progress, failure, text, bound))
    if skip is None and tries > limits.max_failures_without_progress:
        return GiveUp(_no_progress(progress, failure, text, limits))
    return Retry(
        delay_s=_delay_s(tries),
        reason=text,
        shrink=isinstance(failure, OutOfMemory),
        skip_batch=skip,
        lower_lr=skip is None and isinstance(failure, NonFinite) and failure.what != "weights" and limits.on_non_finite == "lower_lr",
    )


def _delay_s(tries: int) -> float:
    """The first failure is answered at once; what fails again is given time to pass."""
    return 0.0 if tries <= 1 else BACK_OFF_S[min(tries - 1, len(BACK_OFF_S) - 1)]


def _batch_to_skip(progress: Progress, failure: SegmentFailure, limits: MemOrchestrator) -> int | None:
    """The batch that is to be left out, where the user allows it; None where the cause may be something else."""
    batch = _failed_batch(failure)
    if batch is None:
        return None
    if isinstance(failure, NonFinite) and failure.what in ("loss", "gradient", "loss_spike") and limits.on_non_finite == "skip":
        return batch
    poisoned = progress.same_batch_failures >= SUSPECT_AFTER and isinstance(failure, NonFinite | WorkerError | WorkerLost | OutOfMemory)
    return batch if poisoned and limits.on_poisoned_batch == "skip" else None


def _failed_batch(failure: SegmentFailure) -> int | None:
    """The batch that was being done, where the failure is one of doing a batch."""
    if isinstance(failure, NonFinite):
        return None if failure.what == "weights" else failure.batch_index
    return failure.evidence.batch_index if failure.evidence.phase in ("forward", "backward", "step", "first_step") else None


def _poisoned(progress: Progress, failure: SegmentFailure, text: str, why: str) -> MemError:
    return NoProgress(
        f"{text}; {why}.{_suspect_words(progress, failure)}".rstrip("."),
        remedy="Look at those samples, or set resilience.on_poisoned_batch: skip, resilience.on_non_finite: skip or lower_lr.",
    )


def _suspect_words(progress: Progress, failure: SegmentFailure) -> str:
    ids = failure.sample_ids if isinstance(failure, NonFinite) and failure.sample_ids else progress.sample_ids
    return f" Batch {_failed_batch(failure)} holds samples {list(ids)}." if ids and _failed_batch(failure) is not None else ""


def _no_progress(progress: Progress, failure: SegmentFailure, text: str, limits: MemOrchestrator) -> MemError:
    where = f"validated step {progress.validated_step or 0} did not advance over {limits.max_failures_without_progress} restarts"
    if isinstance(failure, SaveFailed):
        remedy = "Free space, lower checkpoint.keep_last or repair the store, then give the same command again."
        return StoreUnavailable(f"{text}; {where}", remedy=remedy)
    if isinstance(failure, WorkerError) and progress.same_batch_failures == 0 and failure.evidence.phase == "start":
        return InternalError(f"{text}; {where}", remedy="Read logs/rank-*.log in the run folder and report it.")
    if progress.same_batch_failures >= SUSPECT_AFTER and _failed_batch(failure) is not None:
        return _poisoned(progress, failure, text, f"{where}. Batch {_failed_batch(failure)} failed each time")
    return NoProgress(
        f"{text}; {where}",
        remedy="Read the last lines above and logs/rank-*.log in the run folder, mend the cause, then give the same command again.",
    )
