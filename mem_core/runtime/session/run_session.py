"""A run being driven by this process: what the flow's tasks call. Decisions come from the pure core, actions happen here."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from mem_core.core.policy.local_policy_engine import LocalPolicyEngine
from mem_core.core.recovery.interval import RunPace
from mem_core.core.recovery.mem_orchestrator import Finish, GiveUp, Limits, Pause, Progress, Retry, Train, next_action
from mem_core.core.run.fold import fold_result, fold_state
from mem_core.core.run.run_report import write_report
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import InternalError, Interrupted, MemError, MemoryExhausted, PolicyRefused, StoreUnavailable
from mem_core.domain.events import Evaluated, Noted, RunEnded
from mem_core.domain.plan import Hyperparams
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.domain.segment import Evidence, NonFinite, SaveFailed, SegmentCompleted, SegmentFailure, SegmentInterrupted
from mem_core.infrastructure.telemetry.progress import Progress as ProgressPort
from mem_core.runtime.proof.validator_process import ValidatorProcess
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.session.advice_service import AdviceService
from mem_core.runtime.session.checkpoint_service import CheckpointService, SaveResult
from mem_core.runtime.session.remote_service import RemoteService
from mem_core.runtime.session.segment_service import SegmentFailed, SegmentService, StopFlag


class RetrySegment(Exception):
    """The segment is to be tried again; Prefect's own task retry does it, so that the UI shows attempt and cause."""


@dataclass
class RunSession:
    """One attempt of one run. Made by `bootstrap.open_session`; used from the flow's main thread except `complete_save`."""

    request: RuntimeRequest
    environment: EnvironmentReport
    state: StateManager
    server: ForkServer
    segments: SegmentService
    checkpoints: CheckpointService
    validator: ValidatorProcess
    remote: RemoteService | None
    advice: AdviceService
    progress: ProgressPort
    stop: StopFlag
    failures_without_progress: int = 0
    save_failures: int = 0
    closed: bool = False
    _hyperparams: dict[int, Hyperparams] = field(default_factory=dict)
    _last_failed_batch: tuple[str, int | None] = ("", None)
    _same_batch: int = 0

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.state.folder

    @property
    def limits(self) -> Limits:
        """Bounds from the request."""
        return Limits(
            max_steps=self.request.training.max_steps,
            segment_steps=self.request.effective_segment_steps,
            max_failures_without_progress=self.request.resilience.max_failures_without_progress,
            memory_mode=self.request.memory.mode,
            on_poisoned_batch=self.request.resilience.on_poisoned_batch,
            on_non_finite=self.request.resilience.on_non_finite,
            max_skipped_batches=self.request.resilience.max_skipped_batches,
        )

    # -- the loop -------------------------------------------------------------------------------------------------------

    def next_segment(self) -> Train | None:
        """The next segment, or None when every step is applied. Raises Interrupted after a request to stop."""
        if self.stop:
            raise self._interrupted(self.stop.by)
        position = self.segments.locate()
        action = next_action(self._progress(position.applied_steps), None, self.limits)
        match action:
            case Train():
                return action
            case Finish():
                return None
            case Retry() | GiveUp() | Pause():
                raise InternalError(f"unexpected action {action}", remedy="Report this as a bug.")

    def decide(self, segment: Train) -> Hyperparams:
        """What reaches the engine for a segment: recorded before it, replayed when it is done again (I7)."""
        with self.segments.ledger.bucket("planner_wait" if self.advice.has_planner else "idle"):
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
        if outcome.to_step >= self.request.training.max_steps:
            self.segments.probe_last()
        return outcome

    def complete_save(self, step: int) -> SaveResult:
        """Commit, judge, rotate: from a thread, while the next segment trains."""
        return self.checkpoints.complete(step)

    def settle(self, result: SaveResult) -> None:
        """Take a save's result into account. Raises the error that ends the run, if it comes to that."""
        if result.valid:
            self.segments.validated_step = max(self.segments.validated_step or 0, result.step)
            self.failures_without_progress = self.save_failures = self._same_batch = 0
            return
        if result.verdict is not None and result.verdict.weights_bad:
            self.segments.lose_engine()
            self._after_failure(NonFinite(what="weights", batch_index=result.step))
            return
        if result.verdict is not None:
            self.progress.note(
                f"checkpoint of step {result.step} was damaged on disk and quarantined; it is saved again with the next segment"
            )
            return
        if self.segments.position is None:
            return  # its segment failed meanwhile and is done again; that failure has been counted
        self.save_failures += 1
        self.segments.save_failed(result.step, result.problem)
        if self.save_failures > self.request.resilience.max_failures_without_progress:
            raise result.store_error or StoreUnavailable(result.problem, remedy="Free space or repair the store.")

    def _after_failure(self, failure: SegmentFailure, segment_index: int = 0, until_step: int = 0) -> None:
        shrinkable = self.segments.memory.can_shrink_after(failure)
        self.failures_without_progress += 0 if shrinkable else 1  # the ladder has an end of its own
        batch = (failure.kind, failure.evidence.batch_index)
        self._same_batch = self._same_batch + 1 if batch == self._last_failed_batch else 1
        self._last_failed_batch = batch
        action = next_action(self._progress(0, can_shrink=shrinkable, suspect=failure), failure, self.limits)
        match action:
            case Retry():
                if action.shrink:
                    self.segments.memory.shrink_after(failure)
                if action.skip_batch is not None:
                    self.segments.skips.add(action.skip_batch, action.reason)
                    self.progress.note(f"batch {action.skip_batch} is left out from now on: {action.reason}")
                if action.lower_lr:
                    decision = self.advice.lower_learning_rate(segment_index, self.segments.validated_step or 0, until_step)
                    self._hyperparams[segment_index] = decision.applied_hyperparams
                    self.progress.note(f"learning rate x {decision.applied_hyperparams.lr_multiplier} for this segment: {action.reason}")
                if action.delay_s:
                    with self.segments.ledger.bucket("restart"):
                        time.sleep(action.delay_s)
            case GiveUp(MemoryExhausted() as error) if self.request.memory.mode == "adaptive":
                raise self.segments.memory.exhausted(failure, error)
            case GiveUp():
                raise action.error
            case Train() | Finish() | Pause():
                raise InternalError(f"unexpected action {action}", remedy="Report this as a bug.")

    def _progress(self, applied_steps: int, *, can_shrink: bool = False, suspect: SegmentFailure | None = None) -> Progress:
        batch = suspect.evidence.batch_index if suspect is not None and self._same_batch > 1 else None
        return Progress(
            applied_steps=applied_steps,
            validated_step=self.segments.validated_step,
            failures_without_progress=self.failures_without_progress,
            same_batch_failures=self._same_batch,
            can_shrink=can_shrink,
            sample_ids=self.segments.skips.samples_of(batch) if batch is not None else (),
            skipped_batches=len(self.segments.skips.batches),
        )

    # -- endings --------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """After the last step was validated: validation loss for the report."""
        for _ in range(self.request.resilience.max_failures_without_progress):
            try:
                loss = self.segments.evaluate()
            except SegmentFailed as exc:
                self.progress.note(f"the evaluation is done again: {exc}")
                continue
            if math.isfinite(loss):
                self.state.emit(Evaluated(step=self.segments.locate().applied_steps, validation_loss=loss))
            return
        self.progress.note("no validation loss: the workers died in each evaluation; every step is applied and proven all the same")

    def interrupted(self, outcome: SegmentInterrupted) -> MemError:
        """The error of an attempt that was asked to stop and has committed what it had."""
        return self._interrupted(outcome.by)

    def _interrupted(self, by: str) -> Interrupted:
        step = self.segments.validated_step or 0
        return Interrupted(f"stopped by {by} at validated step {step}", remedy="The same command goes on from there.")

    def close(self, error: BaseException | None) -> RunResult:
        """End workers, journal the ending, write report and result, give the run back. Leaves no process behind (I10)."""
        if not self.closed:
            self.closed = True
            self.segments.close()
            self.validator.close()
            self.server.close()
            self.checkpoints.manager.close()
            self._journal_end(error)
            if self.remote is not None and not self.remote.close():
                self.progress.note("the remote store is behind; everything is in the local run folder and is sent with the next start")
            self.state.release()
            self.progress.close()
        return self.result()

    def _journal_end(self, error: BaseException | None) -> None:
        try:
            self.state.fence()
            self.state.emit(self.segments.ledger.drain())
            self.state.emit(ending_of(error))
            self._write_outputs()
        except MemError as exc:
            self.progress.note(f"the ending could not be recorded: {exc}")

    def _write_outputs(self) -> None:
        from mem_core.core.run.state_manager import write_atomically

        try:
            write_report(self.folder)
        except Exception as exc:  # noqa: BLE001 - telemetry never decides how a run ends
            self.state.emit(Noted(text=f"the report could not be written: {type(exc).__name__}: {exc}"))
        write_atomically(self.folder / "result.json", self.result().model_dump_json(indent=2))

    def result(self) -> RunResult:
        """How the run stands, folded from the journal."""
        report = self.folder / "report.html"
        folded = fold_result(self.state.lines())
        return folded.model_copy(
            update={
                "run_id": self.request.run_id,
                "device": self.environment.device,
                "report_url": report.absolute().as_uri() if report.exists() else "",
                "run_folder": str(self.folder.absolute()),
            }
        )


def ending_of(error: BaseException | None) -> RunEnded:
    """How an attempt ended, by what it ended over; None is a run that is complete."""
    if error is None:
        return RunEnded(status="completed", exit_code=0)
    if isinstance(error, MemError):
        status = "interrupted" if error.exit_code == Interrupted.exit_code else "failed"
        return RunEnded(status=status, exit_code=error.exit_code, message=str(error))
    interrupted = not isinstance(error, Exception)
    code = Interrupted.exit_code if interrupted else InternalError.exit_code
    return RunEnded(status="interrupted" if interrupted else "failed", exit_code=code, message=f"{type(error).__name__}: {error}")


def folded_limits(state: StateManager) -> tuple[int, int, RunPace]:
    """(failures without progress, highest step ever done, pace) from the journal, for the start of an attempt."""
    lines, pace = state.lines(), RunPace()
    for line in lines:
        pace.add(line.event)
    folded = fold_state(lines)
    return folded.failures_without_progress, folded.highest_step, pace


def policy_engine(bounds_file: str | None) -> LocalPolicyEngine:
    """The engine with built-in or user-given bounds."""
    from mem_core.infrastructure.request.policy_file import load_policy_file

    return LocalPolicyEngine(load_policy_file(bounds_file)) if bounds_file else LocalPolicyEngine()
