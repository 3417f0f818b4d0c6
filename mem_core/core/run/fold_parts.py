"""The parts of the run fold: the line of work and the failures (checkpoints: `fold_checkpoints`). Each is small, total and linear."""

from dataclasses import dataclass

from mem_core.domain.events import FaultMet, Recovered, Resumed
from mem_core.domain.run import FaultRecord, RepeatedFailure
from mem_core.domain.segment import OutOfMemory, SegmentCompleted, SegmentFailure, SegmentInterrupted, describe_failure

KILLED_FAULT_KIND = "run_killed"


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps `from_step` (exclusive) to `to_step` (inclusive) as they stand in the run's line of work."""

    to_step: int
    batch_index: int
    tokens: int
    duration_s: float
    loss_first: float | None
    loss_last: float | None
    trajectory_digest: str
    weights_digest: str


class LineOfWork:
    """The segments that count, in step order; going back drops those beyond."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._skipped_steps = 0
        self.applied_steps = 0
        self.highest_step = 0
        self.tokens = 0
        self.duration_s = 0.0

    @property
    def batch_index(self) -> int:
        """Batches consumed: applied and skipped (I3)."""
        return self.applied_steps + self._skipped_steps

    @property
    def loss_first(self) -> float | None:
        """Loss of the first step that counts."""
        return next((stretch.loss_first for stretch in self._stretches if stretch.loss_first is not None), None)

    @property
    def loss_last(self) -> float | None:
        """Loss of the last step that counts."""
        return next((stretch.loss_last for stretch in reversed(self._stretches) if stretch.loss_last is not None), None)

    @property
    def tokens_per_s(self) -> float:
        """Over the time of the segments that count; tokens of segments that the journal lost have no time."""
        timed_tokens = self.tokens - sum(stretch.tokens for stretch in self._stretches if stretch.duration_s <= 0)
        return timed_tokens / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def digests(self) -> tuple[str, str]:
        """(trajectory digest, weights digest) of the position, empty where the segment named none."""
        if not self._stretches or self._stretches[-1].to_step != self.applied_steps:
            return "", ""
        return self._stretches[-1].trajectory_digest, self._stretches[-1].weights_digest

    def extend(self, outcome: SegmentCompleted | SegmentInterrupted) -> None:
        """A segment was done up to its `to_step`."""
        self.go_back(min(self.applied_steps, outcome.to_step))
        self.applied_steps = outcome.to_step
        self.reached(outcome.to_step)
        if outcome.batch_index is not None:
            self._skipped_steps = max(0, outcome.batch_index - outcome.to_step)
        self.tokens += outcome.tokens
        self.duration_s += outcome.duration_s
        self._stretches.append(
            _Stretch(
                to_step=outcome.to_step,
                batch_index=self.batch_index,
                tokens=outcome.tokens,
                duration_s=outcome.duration_s,
                loss_first=outcome.loss_first,
                loss_last=outcome.loss_last,
                trajectory_digest=outcome.trajectory_digest,
                weights_digest=outcome.weights_digest,
            )
        )

    def go_to(self, step: int) -> None:
        """Work goes on from `step`, whatever was recorded."""
        self.go_back(step)
        self.applied_steps = max(self.applied_steps, step)
        self.reached(step)

    def resume(self, event: Resumed) -> None:
        """Work goes on from a checkpoint; where the journal has lost what led there, the checkpoint's own word stands for it."""
        self.go_to(event.step)
        if self._stretches and self._stretches[-1].to_step == event.step:
            return
        self._skipped_steps = max(0, event.batch_index - event.step)
        tokens = max(0, event.tokens - self.tokens)
        self.tokens += tokens
        self._stretches.append(
            _Stretch(event.step, self.batch_index, tokens, 0.0, None, None, event.trajectory_digest, event.weights_digest)
        )

    def go_back(self, step: int) -> None:
        """Drop what lies beyond `step`; nothing happens where nothing does."""
        while self._stretches and self._stretches[-1].to_step > step:
            dropped = self._stretches.pop()
            self.tokens -= dropped.tokens
            self.duration_s -= dropped.duration_s
        if step < self.applied_steps:
            self.applied_steps = step
            last = self._stretches[-1] if self._stretches else None
            self._skipped_steps = min(self._skipped_steps, last.batch_index - last.to_step) if last else 0

    def reached(self, step: int) -> None:
        """A step was done, whether it counts or not."""
        self.highest_step = max(self.highest_step, step)

    def reached_batch(self, batch_index: int | None) -> None:
        """A segment failed in this batch: the steps before it had been done."""
        if batch_index is not None:
            self.reached(max(0, batch_index - self._skipped_steps))

    def step_of(self, batch_index: int | None) -> int | None:
        """Steps that had been applied when this batch was taken."""
        return None if batch_index is None else max(0, batch_index - self._skipped_steps)


class Failures:
    """What went wrong, how often, and whether it is the same thing again."""

    def __init__(self) -> None:
        self._records: list[FaultRecord] = []
        self._open: dict[str, list[int]] = {}
        self._unnamed: FaultRecord | None = None
        self._named = False
        self._reached_step: int | None = None
        self._restart_due = False
        self._oom_due = False
        self._failed_loads: dict[int, int] = {}
        self.now_s = 0.0
        self.restarts = 0
        self.ooms_absorbed = 0
        self.ooms_fatal = 0
        self.without_progress = 0
        self.kills_without_progress = 0
        self.repeated: RepeatedFailure | None = None

    def records(self) -> tuple[FaultRecord, ...]:
        """Every fault in order; a failed segment that no `fault_met` named (the run ended over it) is among them."""
        return (*self._records, self._unnamed) if self._unnamed else tuple(self._records)

    def segment_started(self) -> None:
        """Training goes on; after a failure that is a restart, and an OOM behind it was survived."""
        self._name_the_unnamed()
        self._named = False
        self._reached_step = None
        self.restarts += self._restart_due
        self.ooms_absorbed += self._oom_due
        self._restart_due = self._oom_due = False

    def segment_failed(self, failure: SegmentFailure, validated_step: int, reached_step: int | None) -> None:
        """A segment ended badly."""
        self.without_progress += 1
        loading = failure.evidence.restoring_step
        if loading is not None:
            self._failed_loads[loading] = self._failed_loads.get(loading, 0) + 1
        self._reached_step = reached_step
        self._restart_due = True
        self._oom_due = isinstance(failure, OutOfMemory)
        if not self._named:
            self._unnamed = self._fault(failure.kind, validated_step, describe_failure(failure))
        batch_index = failure.evidence.batch_index
        if batch_index is None:
            self.repeated = None
            return
        same = self.repeated and (self.repeated.kind, self.repeated.batch_index) == (failure.kind, batch_index)
        count = self.repeated.count + 1 if self.repeated and same else 1
        self.repeated = RepeatedFailure(kind=failure.kind, batch_index=batch_index, count=count)

    def fault_met(self, event: FaultMet) -> None:
        """The orchestrator's own word for the fault."""
        self._unnamed = None
        self._named = True
        self._record(self._fault(event.kind, event.step, event.detail))

    def recovered(self, event: Recovered) -> None:
        """Closes the latest open fault of that kind, else the latest open one."""
        self._name_the_unnamed()
        kind = event.kind if self._open.get(event.kind) else max((k for k, v in self._open.items() if v), key=self._latest, default="")
        if kind:
            index = self._open[kind].pop()
            self._records[index] = self._records[index].model_copy(update={"recovered_s": event.recovered_s})

    def killed(self, attempt: int, resumed_step: int) -> None:
        """An attempt ended without a word and another one took over."""
        self._name_the_unnamed()
        self._record(self._fault(KILLED_FAULT_KIND, resumed_step, f"attempt {attempt} ended without a word"))
        self.restarts += 1
        self.kills_without_progress += 1
        self.ooms_absorbed += self._oom_due
        self._restart_due = self._oom_due = False

    def started_anew(self) -> None:
        """An attempt after an orderly end: somebody chose to go on, so the count of failures begins again."""
        self.without_progress = self.kills_without_progress = 0
        self._failed_loads.clear()
        self.repeated = None
        self._restart_due = self._oom_due = False

    def run_ended(self, *, fatal: bool) -> None:
        """The attempt is over; an OOM that it ended over was fatal."""
        self._name_the_unnamed()
        self.ooms_fatal += self._oom_due and fatal
        self._restart_due = self._oom_due = False

    def oom_absorbed(self) -> None:
        """An OOM was survived inside a segment, or is reported as survived after one that failed: once either way."""
        self.ooms_absorbed += 1
        self._oom_due = False

    def passed(self, batch_index: int) -> None:
        """Training went beyond the batch that had failed: it was not the batch."""
        if self.repeated and batch_index > self.repeated.batch_index:
            self.repeated = None

    def progressed(self) -> None:
        """The validated step rose."""
        self.without_progress = self.kills_without_progress = 0
        self._failed_loads.clear()

    def set_aside(self, step: int) -> None:
        """A checkpoint was condemned: tries that failed in loading it say nothing about the run."""
        self.without_progress = max(0, self.without_progress - self._failed_loads.pop(step, 0))

    def _name_the_unnamed(self) -> None:
        if self._unnamed:
            self._record(self._unnamed)
            self._unnamed = None

    def _fault(self, kind: str, step: int, detail: str) -> FaultRecord:
        return FaultRecord(kind=kind, step=step, detail=detail, reached_step=self._reached_step, time_unix_s=self.now_s)

    def _record(self, record: FaultRecord) -> None:
        self._open.setdefault(record.kind, []).append(len(self._records))
        self._records.append(record)

    def _latest(self, kind: str) -> int:
        return self._open[kind][-1]
