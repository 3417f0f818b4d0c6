"""A run being driven by this process: what the flow's tasks call. Decisions come from the pure core, actions happen here."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mem_core.core.recovery.actions import Action, Evaluate, Finish, GiveUp, Pause, Progress, Retry, Train
from mem_core.core.recovery.failure_count import FailureCount
from mem_core.core.recovery.interval import RunPace
from mem_core.core.recovery.mem_orchestrator import MemOrchestrator
from mem_core.core.run.fold import fold_state
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.errors import InternalError, Interrupted, MemoryExhausted, PolicyRefused, StoreUnavailable
from mem_core.domain.plan import Hyperparams
from mem_core.domain.run import RunResult
from mem_core.domain.segment import Evidence, NonFinite, SaveFailed, SegmentCompleted, SegmentFailure, SegmentInterrupted
from mem_core.runtime.session.advice_service import AdviceService
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.checkpoint_service import CheckpointService, SaveResult
from mem_core.runtime.session.ending import Ending
from mem_core.runtime.session.results.evaluation_service import LAST_GRACE_S, EvaluationService
from mem_core.runtime.session.results.export_service import ExportService
from mem_core.runtime.session.results.sampling_service import SamplingService
from mem_core.runtime.session.segment_outcomes import SegmentFailed
from mem_core.runtime.session.segment_service import SegmentService


class RetrySegment(Exception):
    """The segment is to be tried again; Prefect's own task retry does it, so that the UI shows attempt and cause."""


@dataclass
class RunSession:
    """One attempt of one run. Made by `wire`; used from the flow's main thread except `complete_save`."""

    attempt: Attempt
    segments: SegmentService
    checkpoints: CheckpointService
    advice: AdviceService
    ending: Ending
    evaluations: EvaluationService
    samples: SamplingService
    exports: ExportService
    failures: FailureCount = field(default_factory=FailureCount)
    _hyperparams: dict[int, Hyperparams] = field(default_factory=dict[int, Hyperparams])

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.attempt.state.folder

    # -- the loop -------------------------------------------------------------------------------------------------------

    def next_action(self) -> Action:
        """What is due now: a segment, the end, or an end because somebody asked for it."""
        position = self.segments.ranks.locate()
        step = position.applied_steps
        known = {
            "is_evaluated": self.evaluations.is_done(step),
            "is_sampled": self.samples.is_done(step),
            "stops_early": self.evaluations.stop_due(step) is not None,
        }
        return self._orchestrator.next_action(self._progress(step).model_copy(update=known), None)

    @contextlib.contextmanager
    def waiting_for_verdict(self) -> Iterator[None]:
        """Time within the block is booked as waiting for a checkpoint's verdict."""
        with self.attempt.ledger.bucket("validation_wait"):
            yield

    def decide(self, segment: Train) -> Hyperparams:
        """What reaches the engine for a segment: recorded before it, replayed when it is done again (I7)."""
        with self.attempt.ledger.bucket("planner_wait" if self.advice.has_planner else "idle"):
            decision = self.advice.decide(segment.segment_index, segment.from_step, segment.until_step)
        if decision.request_refused:
            raise PolicyRefused(
                decision.detail or decision.reason, field="policy", value=decision.reason, remedy="Ask for what the lane allows."
            )
        self._hyperparams[segment.segment_index] = decision.applied_hyperparams
        return decision.applied_hyperparams

    def train_segment(self, segment_index: int, until_step: int, try_number: int) -> SegmentCompleted | SegmentInterrupted:
        """One try. Raises RetrySegment when another try is due, or the error that ends the run."""
        try:
            outcome = self.segments.train(segment_index, until_step, self._hyperparams[segment_index], try_number)
        except SegmentFailed as exc:
            self._after_failure(exc.failure, segment_index, until_step)
            raise RetrySegment(str(exc)) from exc
        except StoreUnavailable as exc:
            # The engine is sound: a store that is away for a moment costs a wait, not the attempt.
            self._after_failure(SaveFailed(evidence=Evidence(phase="save", exception=str(exc)[:500])), segment_index, until_step)
            raise RetrySegment(str(exc)) from exc
        if outcome.to_step >= self.attempt.request.training.max_steps:
            self.segments.probe_last()
        return outcome

    def evaluate(self, step: int) -> bool:
        """Look at the held-out rows and answer the prompts beside the save of `step`. False where that came to nothing: it is asked for
        again. Before the first step only prompts are answered."""
        done = self._look(step)
        if done and self._is_last(step):
            self.segments.probe_last()
        return done

    def _look(self, step: int, grace_s: float = 0.0) -> bool:
        """Whatever of both is still to be found out; what is known is not asked for again."""
        if step and not self.evaluations.is_done(step) and not self.evaluations.evaluate(step, grace_s=grace_s):
            return False
        return self.samples.is_done(step) or self.samples.sample(step, grace_s=grace_s)

    def complete_save(self, step: int) -> SaveResult:
        """Commit, judge, rotate: from a thread, while the next segment trains."""
        return self.checkpoints.complete(step)

    def settle(self, result: SaveResult) -> None:
        """Take a save's result into account. Raises the error that ends the run, if it comes to that."""
        if result.valid:
            self.segments.standing.validated_step = max(self.segments.standing.validated_step or 0, result.step)
            self.failures.progressed()
            return
        if result.verdict is not None and result.verdict.weights_bad:
            self.segments.ranks.lose()
            self._after_failure(NonFinite(what="weights", batch_index=result.step))
            return
        if self.segments.standing.position is None:
            return  # its segment failed meanwhile and is done again; that failure has been counted
        last = self._is_last(result.step)
        again = "its segment is done again" if last else "it is saved again with the next segment"
        if result.verdict is not None:
            self.attempt.progress.note(f"checkpoint of step {result.step} was damaged on disk and quarantined; {again}")
            problem = f"checkpoint of step {result.step} was damaged on disk: {'; '.join(result.verdict.reasons)}"
        else:
            self.segments.save_failed(result.step, result.problem)
            problem = result.problem
        if last or result.verdict is None:
            self.failures.save_failed()
        if self.failures.saves > self.attempt.request.resilience.max_failures_without_progress:
            raise result.store_error or StoreUnavailable(problem, remedy="Free space or repair the store.")
        if last:
            self.segments.ranks.lose()  # nothing comes after it that could be saved in its stead

    def _after_failure(self, failure: SegmentFailure, segment_index: int = 0, until_step: int = 0) -> None:
        memory = self.segments.ranks.memory
        shrinkable, in_pieces = memory.can_shrink_after(failure), memory.can_defragment_after(failure)
        self.failures.failed(failure, counts=not (shrinkable or in_pieces))  # the memory ladder has an end of its own
        progress = self._progress(0, can_shrink=shrinkable, suspect=failure).model_copy(update={"can_defragment": in_pieces})
        action = self._orchestrator.next_action(progress, failure)
        match action:
            case Retry():
                if action.set_aside_step is not None:
                    self.failures.passed_over(action.set_aside_step)
                    self.segments.ranks.pass_over(action.set_aside_step, action.reason)
                if action.defragment:
                    memory.defragment_after(failure)
                if action.shrink:
                    memory.shrink_after(failure)
                if action.skip_batch is not None:
                    self.segments.skips.add(action.skip_batch, action.reason)
                    self.attempt.progress.note(f"batch {action.skip_batch} is left out from now on: {action.reason}")
                if action.lower_lr:
                    self._lower_rate(segment_index, until_step, action.reason)
                if action.delay_s:
                    with self.attempt.ledger.bucket("restart"):
                        time.sleep(action.delay_s)
            case GiveUp(MemoryExhausted() as error) if self.attempt.request.memory.mode == "adaptive":
                raise memory.exhausted(failure, error)
            case GiveUp():
                raise action.error
            case Train() | Evaluate() | Finish() | Pause():
                raise InternalError(f"unexpected action {action}", remedy="Report this as a bug.")

    def _is_last(self, step: int) -> bool:
        """Whether no step comes after it."""
        return step >= self.attempt.request.training.max_steps or self.evaluations.stop_due(step) is not None

    def _lower_rate(self, segment_index: int, until_step: int, reason: str) -> None:
        decision = self.advice.lower_learning_rate(segment_index, self.segments.standing.validated_step or 0, until_step)
        self._hyperparams[segment_index] = decision.applied_hyperparams
        multiplier = decision.applied_hyperparams.lr_multiplier
        self.attempt.progress.note(f"learning rate x {multiplier} for this segment: {reason}")

    @property
    def _orchestrator(self) -> MemOrchestrator:
        return MemOrchestrator.of(self.attempt.request)

    def _progress(self, applied_steps: int, *, can_shrink: bool = False, suspect: SegmentFailure | None = None) -> Progress:
        batch = suspect.evidence.batch_index if suspect is not None and self.failures.same_batch > 1 else None
        loading = suspect.evidence.restoring_step if suspect is not None else None
        ranks = self.segments.ranks
        return Progress(
            applied_steps=applied_steps,
            validated_step=self.segments.standing.validated_step,
            failures_without_progress=self.failures.without_progress,
            same_batch_failures=self.failures.same_batch,
            stop_by=self.attempt.stop.by,
            can_shrink=can_shrink,
            sample_ids=self.segments.skips.samples_of(batch) if batch is not None else (),
            skipped_batches=len(self.segments.skips.batches),
            failed_loads=self.failures.loads.get(loading, 0) if loading is not None else 0,
            can_fall_back=ranks.can_fall_back(loading),
            passed_over=ranks.passed_over,
            same_errors=self.failures.same_error,
            same_error_batches=len(self.failures.same_error_batches),
            has_stepped=self.segments.standing.has_stepped,
        )

    # -- endings --------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """After the last step was proven: held-out rows and prompts once more, unless an earlier attempt did, why it was the last, and
        the model folder that a run on a model folder ends with.

        Raises:
            Interrupted: somebody asked for an end and these would have taken long; every step is proven, the rest is still to do.
        """
        step = self.segments.ranks.locate().applied_steps
        while not (self.evaluations.is_done(step) and self.samples.is_done(step)):  # bounded: it is given up after some tries
            if not self._look(step, LAST_GRACE_S) and self.attempt.stop:
                raise self.interrupted()
        if step < self.attempt.request.training.max_steps:
            self.evaluations.stopped(step)
        self.segments.close()  # no step comes after it, and the export wants the memory
        self.exports.export(step, self.result().weights_digest)

    def interrupted(self) -> Interrupted:
        """The error of an attempt that was asked to stop and has committed what it had."""
        step = self.segments.standing.validated_step or 0
        return Interrupted(f"stopped by {self.attempt.stop.by} at validated step {step}", remedy="The same command goes on from there.")

    def close(self, error: BaseException | None) -> RunResult:
        """End workers, journal the ending, write report and result, give the run back. Leaves no process behind (I10)."""
        return self.ending.close(error)

    def result(self) -> RunResult:
        """How the run stands, folded from the journal."""
        return self.ending.result()


def folded_limits(state: StateManager) -> tuple[FailureCount, int, RunPace]:
    """(failures so far, highest step ever done, pace) from the journal, for the start of an attempt."""
    lines, pace = state.lines(), RunPace()
    for line in lines:
        pace.add(line.event)
    folded = fold_state(lines)
    return FailureCount(without_progress=folded.failures_without_progress), folded.highest_step, pace
