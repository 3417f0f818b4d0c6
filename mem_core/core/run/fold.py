"""From the journal to where a run is (`RunState`) and how it ended (`RunResult`): pure, total and linear in the lines.

Steps that were done again are not counted twice: going back to a step drops what had been recorded beyond it.
`RunFold` takes lines one at a time, so that the process that writes the journal need not read it again.
"""

from collections.abc import Iterable
from typing import Any, assert_never

from mem_core.core.results.evaluations import EvaluationBook
from mem_core.core.results.samples import SampleBook
from mem_core.core.run.fold_checkpoints import Checkpoints
from mem_core.core.run.fold_parts import Failures, LineOfWork
from mem_core.core.run.goodput import WallTimeFold
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import (
    AttemptStarted,
    BatchSkipped,
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointMirrored,
    CheckpointRemoved,
    CheckpointSealed,
    DataPrepared,
    DoctorReported,
    Evaluated,
    Event,
    Exported,
    FaultMet,
    FiguresLogged,
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
    TimeSpent,
)
from mem_core.domain.plan import MemoryPlanChange
from mem_core.domain.results.exports import ExportSummary
from mem_core.domain.results.origin import ForkOrigin
from mem_core.domain.run import DataSummary, DecidedSegment, MemorySummary, PolicyCounts, RunResult, RunState, RunStatus
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted


def fold_result(lines: Iterable[JournalLine], *, run_id: str = "", run_folder: str = "", report_url: str = "") -> RunResult:
    """How the run ended or stands. The journal does not name the run; what it cannot know comes as arguments."""
    return _folded(lines).result(run_id=run_id, run_folder=run_folder, report_url=report_url)


def fold_state(lines: Iterable[JournalLine]) -> RunState:
    """Where the run is."""
    return _folded(lines).state()


def _folded(lines: Iterable[JournalLine]) -> "RunFold":
    fold = RunFold()
    for line in lines:
        fold.add(line)
    return fold


class RunFold:
    """Journal lines in order through `add`; `state` and `result` at any time. Never raises on any order of lines.

    A fault alone does not move the position: the next `segment_started` says where work goes on (a checkpoint that is saved
    again costs no step), and only an end that follows a fault leaves the run at the step the fault named.
    """

    def __init__(self) -> None:
        self._time = WallTimeFold()
        self._line = LineOfWork()
        self._failures = Failures()
        self._checkpoints = Checkpoints()
        self._back_step: int | None = None
        self._attempt = 0
        self._status: RunStatus = "running"
        self._exit_code, self._message = 0, ""
        self._plan_changes: list[MemoryPlanChange] = []
        self._plan_history: list[dict[str, Any]] = []
        self._decided: dict[int, DecidedSegment] = {}
        self._num_decisions = self._num_clamped = self._num_refused = 0
        self._report: EnvironmentReport | None = None
        self._data: DataSummary | None = None
        self._peak_bytes = 0
        self._book, self._samples = EvaluationBook(), SampleBook()
        self._export: ExportSummary | None = None
        self._origin: ForkOrigin | None = None
        self._logged_to: dict[str, str] = {}

    def add(self, line: JournalLine) -> None:
        """Take the next line."""
        event = line.event
        self._failures.now_s = line.time_unix_s
        self._book.add(event)
        self._samples.add(event)
        match event:
            case AttemptStarted():
                self._on_attempt_started(event, line.time_unix_s)
            case RunEnded():
                self._on_run_ended(event, line.time_unix_s)
            case TimeSpent():
                self._time.time_spent(line.time_unix_s, event.seconds)
            case _:
                self._time.alive(line.time_unix_s)
                self._add_untimed(event)

    def _add_untimed(self, event: Event) -> None:
        match event:
            case DoctorReported():
                self._report = event.report
            case DataPrepared():
                self._data = event.data
            case PolicyDecided():
                self._on_policy_decided(event)
            case SegmentStarted():
                self._line.go_to(event.from_step)
                self._back_step = None
                self._failures.segment_started()
            case MemoryPlanChanged():
                self._on_plan_changed(event)
            case SegmentEnded():
                self._on_segment_ended(event)
            case CheckpointCommitted():
                self._checkpoints.committed(event)
                self._line.reached(event.step)
            case CheckpointJudged():
                if self._checkpoints.judged(event):
                    self._failures.progressed()
                elif not event.verdict.valid:
                    self._failures.set_aside(event.verdict.step)
            case CheckpointRemoved():
                self._checkpoints.removed(event.step)
            case CheckpointMirrored():
                self._checkpoints.mirrored(event)
            case OomAbsorbed():
                self._failures.oom_absorbed()
            case FaultMet():
                self._failures.fault_met(event)
                self._back_step = event.step
            case Resumed():
                self._line.resume(event)
                self._back_step = None
            case Recovered():
                self._failures.recovered(event)
            case CheckpointSealed() | BatchSkipped() | Noted() | AttemptStarted() | RunEnded() | TimeSpent():
                pass
            case Evaluated() | Sampled() | RunStoppedEarly():
                pass  # figures and answers are in the books
            case Forked():
                self._origin = event.origin
            case FiguresLogged():
                self._logged_to[event.logger] = event.address
            case Exported():
                self._export = event.summary
            case _:
                assert_never(event)

    def state(self) -> RunState:
        """Where the run is after the lines so far."""
        return RunState(
            attempt=self._attempt,
            last_status=self._status,
            applied_steps=self._line.applied_steps,
            batch_index=self._line.batch_index,
            skipped_steps=self._line.batch_index - self._line.applied_steps,
            tokens=self._line.tokens,
            highest_step=self._line.highest_step,
            newest_validated_step=self._checkpoints.newest_validated_step,
            newest_committed_step=self._checkpoints.newest_committed_step,
            failures_without_progress=self._failures.without_progress,
            kills_without_progress=self._failures.kills_without_progress,
            repeated_failure=self._failures.repeated,
            memory_plan_changes=tuple(self._plan_changes),
            decided=tuple(self._decided[index] for index in sorted(self._decided)),
            restarts=self._failures.restarts,
            ooms_absorbed=self._failures.ooms_absorbed,
            ooms_fatal=self._failures.ooms_fatal,
        )

    def result(self, *, run_id: str = "", run_folder: str = "", report_url: str = "") -> RunResult:
        """How the run ended, or stands, after the lines so far. `tokens_per_s` is over the time of the segments that count."""
        line = self._line
        evaluated = self._book.newest
        committed, ended = self._checkpoints.digests_at(line.applied_steps), line.digests
        return RunResult(
            status=self._status,
            run_id=run_id,
            exit_code=self._exit_code,
            message=self._message,
            applied_steps=line.applied_steps,
            skipped_steps=line.batch_index - line.applied_steps,
            epochs=line.applied_steps / self._data.steps_per_epoch if self._data and self._data.steps_per_epoch else None,
            trajectory_digest=committed[0] or ended[0],
            weights_digest=committed[1] or ended[1],
            loss_first=line.loss_first,
            loss_last=line.loss_last,
            validation_loss=evaluated.validation_loss if evaluated else None,
            validation_rows=evaluated.validation_rows if evaluated else None,
            validation_rows_total=evaluated.validation_rows_total if evaluated else None,
            evaluation=evaluated.sets if evaluated else {},
            best=self._book.best(),
            stopped_early=self._book.stopped_early,
            samples=self._samples.newest,
            tokens=line.tokens,
            tokens_per_s=line.tokens_per_s,
            restarts=self._failures.restarts,
            ooms_absorbed=self._failures.ooms_absorbed,
            ooms_fatal=self._failures.ooms_fatal,
            faults=self._failures.records(),
            checkpoints=self._checkpoints.counts(),
            mirror=self._checkpoints.mirror(),
            policy=PolicyCounts(decisions=self._num_decisions, clamped=self._num_clamped, refused=self._num_refused),
            goodput=self._time.total(),
            memory=self._memory(),
            data=self._data,
            export=self._export if self._export and self._export.step == line.applied_steps else None,
            forked_from=self._origin,
            logged_to=dict(self._logged_to),
            device=self._report.device if self._report else "",
            report_url=report_url,
            run_folder=run_folder,
        )

    def _memory(self) -> MemorySummary:
        kind = "device" if self._report and self._report.device == "cuda" else "host"
        budgets = [budget for budget in (self._report.memory if self._report else ()) if budget.kind == kind]
        return MemorySummary(
            peak_bytes=self._peak_bytes,
            budget_bytes=budgets[0].budget_bytes if budgets else 0,
            binding_limit=budgets[0].binding_limit if budgets else "",
            plan_changes=tuple(self._plan_history),
        )

    def _on_attempt_started(self, event: AttemptStarted, time_s: float) -> None:
        killed = self._attempt > 0 and self._status == "running"
        self._time.attempt_started(time_s, previous_killed=killed)
        if killed:
            step = self._checkpoints.newest_validated_step if event.resumed_step is None else event.resumed_step
            self._failures.killed(self._attempt, step or 0)
        else:
            self._failures.started_anew()
        if event.resumed_step is not None:
            self._line.go_to(event.resumed_step)
        elif self._attempt > 0:
            self._line.go_back(self._checkpoints.newest_committed_step or 0)
        self._back_step = None
        self._attempt = max(self._attempt, event.attempt)
        self._status, self._exit_code, self._message = "running", 0, ""

    def _on_run_ended(self, event: RunEnded, time_s: float) -> None:
        self._time.attempt_ended(time_s)
        if self._back_step is not None:
            self._line.go_back(self._back_step)
            self._back_step = None
        self._failures.run_ended(fatal=event.status == "failed")
        self._status, self._exit_code, self._message = event.status, event.exit_code, event.message

    def _on_policy_decided(self, event: PolicyDecided) -> None:
        decision = event.decision
        self._num_decisions += 1
        self._num_clamped += bool(decision.clamps)
        self._num_refused += not decision.allow
        self._decided[event.segment_index] = DecidedSegment(
            segment_index=event.segment_index,
            from_step=event.plan.from_step,
            until_step=event.plan.until_step,
            hyperparams=decision.applied_hyperparams,
            allow=decision.allow,
            reason=decision.reason,
        )

    def _on_plan_changed(self, event: MemoryPlanChanged) -> None:
        """As `record_change` of the plan module, without copying the list for every line."""
        while self._plan_changes and self._plan_changes[-1].batch_index >= event.change.batch_index:
            self._plan_changes.pop()
        self._plan_changes.append(event.change)
        self._peak_bytes = max(self._peak_bytes, event.observed_bytes)
        sizes = {"observed_bytes": event.observed_bytes, "limit_bytes": event.limit_bytes}
        self._plan_history.append({**event.change.model_dump(mode="json"), **sizes})

    def _on_segment_ended(self, event: SegmentEnded) -> None:
        outcome = event.outcome
        if isinstance(outcome, SegmentCompleted | SegmentInterrupted):
            self._peak_bytes = max(self._peak_bytes, outcome.peak_bytes)
            self._line.extend(outcome)
            self._back_step = None
            self._failures.passed(self._line.batch_index)
        else:
            self._peak_bytes = max(self._peak_bytes, outcome.evidence.peak_bytes or 0)
            self._line.reached_batch(outcome.evidence.batch_index)
            reached_step = self._line.step_of(outcome.evidence.batch_index)
            self._failures.segment_failed(outcome, self._checkpoints.newest_validated_step or 0, reached_step)
