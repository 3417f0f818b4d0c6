"""`MemOrchestrator`: from progress and outcome to the next action, purely. Every bound on retries is here."""

from typing import Literal, assert_never

from mem_core.core.recovery.actions import Action, Evaluate, Finish, GiveUp, Pause, Progress, Retry, Train
from mem_core.core.recovery.blame import failed_batch, rate_may_help, scale_at_floor
from mem_core.domain.errors import (
    EnvironmentUnfit,
    InternalError,
    MemError,
    MemoryExhausted,
    NoProgress,
    NoValidCheckpoint,
    StoreUnavailable,
)
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
LOADS_OF_AN_ERROR = 2  # an error in loading one checkpoint, twice in fresh processes, is the checkpoint's: an older one is tried
LOADS_OF_A_DEATH = 3  # a kill, a hang or too little memory comes from outside more often than not
OnNonFinite = Literal["retry", "skip", "lower_lr", "fail"]


class MemOrchestrator(Value):
    """Decides what a run does next, within the bounds that its request sets on going on.

    A frozen value: the same bounds, progress and outcome give the same action for ever, whoever asks and how often.
    """

    max_steps: int
    segment_steps: int
    evaluate_every_steps: int | None = None
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
            evaluate_every_steps=request.effective_evaluation_steps,
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
    step, every_steps = progress.applied_steps, limits.evaluate_every_steps
    if _looks_at(step, every_steps, progress):
        return Evaluate(step)
    if progress.stops_early:
        return Finish()
    # A segment keeps its number where an evaluation cuts it: what was decided for it holds for both parts, so that whether anybody
    # looks at held-out rows changes nothing about training.
    index = step // limits.segment_steps
    until = min(limits.max_steps, (index + 1) * limits.segment_steps)
    if every_steps is not None:
        until = min(until, (step // every_steps + 1) * every_steps)
    return Train(segment_index=index, from_step=step, until_step=until)


def _looks_at(step: int, every_steps: int | None, progress: Progress) -> bool:
    """Whether rows or prompts are due before the next step: prompts before the first step too, whatever else is asked."""
    if step == 0:
        return not progress.is_sampled
    due = every_steps is not None and step % every_steps == 0
    return due and not (progress.is_evaluated and progress.is_sampled)


def _after_failure(progress: Progress, failure: SegmentFailure, limits: MemOrchestrator) -> Action:
    text = describe_failure(failure)
    tries = progress.failures_without_progress
    lasting = _lasting_error(progress, failure, text, limits)
    if lasting is not None:
        return GiveUp(lasting)
    if progress.can_defragment:
        return Retry(delay_s=0.0, reason=text, defragment=True)  # once: then the new workers have the setting
    if isinstance(failure, OutOfMemory) and limits.memory_mode == "fixed":
        return GiveUp(
            MemoryExhausted(
                f"{text}; memory.mode is fixed, so nothing was shrunk",
                remedy="Set memory.mode: adaptive, a smaller memory.micro_batch_size, or a smaller data.sequence_length.",
            )
        )
    loading = _after_failed_load(progress, failure, text)
    if loading is not None:
        return loading
    if isinstance(failure, OutOfMemory) and not progress.can_shrink and tries > 1 and progress.same_batch_failures > 1:
        return GiveUp(MemoryExhausted(f"{text}, and no smaller plan is left", remedy="See the doctor's estimate for what would fit."))
    if isinstance(failure, NonFinite) and failure.what == "loss_scale" and (progress.same_batch_failures > 1 or tries > 2):
        return GiveUp(scale_at_floor(text))
    if isinstance(failure, NonFinite) and limits.on_non_finite == "fail":
        return GiveUp(_poisoned(progress, failure, limits, f"{text}; resilience.on_non_finite is fail"))
    skip = _batch_to_skip(progress, failure, limits)
    if skip is not None and progress.skipped_batches >= limits.max_skipped_batches:
        bound = f"{progress.skipped_batches} batches have been skipped, as many as resilience.max_skipped_batches allows"
        return GiveUp(_poisoned(progress, failure, limits, f"{text}; {bound}"))
    if skip is None and tries > limits.max_failures_without_progress:
        return GiveUp(_no_progress(progress, failure, text, limits))
    return Retry(
        delay_s=_delay_s(tries),
        reason=text,
        shrink=isinstance(failure, OutOfMemory),
        skip_batch=skip,
        lower_lr=skip is None and rate_may_help(failure) and limits.on_non_finite == "lower_lr",
    )


def _lasting_error(progress: Progress, failure: SegmentFailure, text: str, limits: MemOrchestrator) -> MemError | None:
    """The error that ends the run at once, where no further process can mend it; None where one may.

    A batch that fails in the first step of every process is the environment's fault until any other batch was done: only then can its
    samples be to blame. Where the user lets such batches be left out, the next one is tried before that is said.
    """
    if not isinstance(failure, WorkerError):
        return None
    if failure.refusal is not None:
        return failure.refusal.error
    if failure.evidence.restoring_step is not None:
        return None  # an older checkpoint may load where this one does not
    if not failure.before_any_step or progress.same_errors < SUSPECT_AFTER:
        return None
    if failed_batch(failure) is not None:
        skips = limits.on_poisoned_batch == "skip" and progress.same_error_batches < SUSPECT_AFTER
        if progress.has_stepped or skips:
            return None
    return EnvironmentUnfit(
        f"{text}; fresh processes ended with the same error before any step",
        remedy="Mend what it names (the whole traceback is in logs/rank-*.log of the run folder), then give the same command again.",
    )


def _after_failed_load(progress: Progress, failure: SegmentFailure, text: str) -> Action | None:
    """A checkpoint whose bytes hold and that the engine cannot load. Bounded by itself: each has a few tries, and there are only so many.

    One that fails again and again is passed over for an older one. Only when that loads is it known that the newer one is at fault, and
    not the machine; where nothing loads every checkpoint stays where it is.
    """
    step = failure.evidence.restoring_step
    if step is None:
        return None
    bound = LOADS_OF_AN_ERROR if isinstance(failure, WorkerError) else LOADS_OF_A_DEATH
    if progress.can_fall_back:
        again = progress.failed_loads < bound
        return Retry(_delay_s(progress.failed_loads), reason=text, set_aside_step=None if again else step)
    if isinstance(failure, WorkerError) and progress.failed_loads >= bound:
        others = f", nor could those of steps {', '.join(map(str, progress.passed_over))}" if progress.passed_over else ""
        return GiveUp(
            NoValidCheckpoint(
                f"the checkpoint of step {step} is whole and could not be loaded{others}: {text}",
                remedy="Read logs/rank-*.log in the run folder: other versions of the libraries may be the cause. Nothing was moved.",
            )
        )
    return None


def _delay_s(tries: int) -> float:
    """The first failure is answered at once; what fails again is given time to pass."""
    return 0.0 if tries <= 1 else BACK_OFF_S[min(tries - 1, len(BACK_OFF_S) - 1)]


def _batch_to_skip(progress: Progress, failure: SegmentFailure, limits: MemOrchestrator) -> int | None:
    """The batch that is to be left out, where the user allows it; None where the cause may be something else."""
    batch = failed_batch(failure)
    if batch is None:
        return None
    if isinstance(failure, NonFinite) and failure.what in ("loss", "gradient", "loss_spike") and limits.on_non_finite == "skip":
        return batch
    poisoned = progress.same_batch_failures >= SUSPECT_AFTER and isinstance(failure, NonFinite | WorkerError | WorkerLost | OutOfMemory)
    return batch if poisoned and limits.on_poisoned_batch == "skip" else None


def _poisoned(progress: Progress, failure: SegmentFailure, limits: MemOrchestrator, what: str) -> MemError:
    if isinstance(failure, NonFinite) and failure.what == "loss_scale":
        return scale_at_floor(what)
    ways = ["resilience.on_poisoned_batch: skip"] if limits.on_poisoned_batch != "skip" else []
    if rate_may_help(failure):
        ways += [f"resilience.on_non_finite: {way}" for way in ("skip", "lower_lr") if way != limits.on_non_finite]
    also = f", or set {' or '.join(ways)}" if ways else ""
    return NoProgress(f"{what}.{_suspect_words(progress, failure)}".rstrip("."), remedy=f"Look at those samples{also}.")


def _suspect_words(progress: Progress, failure: SegmentFailure) -> str:
    ids = failure.sample_ids if isinstance(failure, NonFinite) and failure.sample_ids else progress.sample_ids
    return f" Batch {failed_batch(failure)} holds samples {list(ids)}." if ids and failed_batch(failure) is not None else ""


def _no_progress(progress: Progress, failure: SegmentFailure, text: str, limits: MemOrchestrator) -> MemError:
    where = f"validated step {progress.validated_step or 0} did not advance over {limits.max_failures_without_progress} restarts"
    if isinstance(failure, SaveFailed):
        remedy = "Free space, lower checkpoint.keep_last or repair the store, then give the same command again."
        return StoreUnavailable(f"{text}; {where}", remedy=remedy)
    if isinstance(failure, WorkerError) and progress.same_batch_failures == 0 and failure.evidence.phase == "start":
        return InternalError(f"{text}; {where}", remedy="Read logs/rank-*.log in the run folder and report it.")
    suspect = progress.same_batch_failures >= SUSPECT_AFTER and failed_batch(failure) is not None
    if suspect and (progress.has_stepped or isinstance(failure, NonFinite)):
        return _poisoned(progress, failure, limits, f"{text}; {where}. Batch {failed_batch(failure)} failed each time")
    said = "" if failure.evidence.exception else " | ".join(failure.evidence.last_lines[-3:])
    return NoProgress(
        f"{text}; {where}{f'. The process said last: {said}' if said else ''}",
        remedy="Read the last lines above and logs/rank-*.log in the run folder, mend the cause, then give the same command again.",
    )
