"""The page of a run: folded from journal lines and progress views, of bounded size however long the run is. Pure."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flows.prefect_view.curves import Curve
from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import (
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointRemoved,
    DoctorReported,
    Evaluated,
    FaultMet,
    JournalLine,
    OomAbsorbed,
    PolicyDecided,
    Recovered,
    RunEnded,
    Sampled,
    SegmentEnded,
    SegmentStarted,
)
from mem_core.domain.policy import PolicyDecision
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.segment import SegmentCompleted
from mem_core.infrastructure.telemetry.live import Rate
from mem_core.infrastructure.telemetry.progress import PreparingView, ProgressView, View

NUM_CHECKPOINTS = 12
NUM_FAULTS = 20
NUM_DECISIONS = 10


@dataclass
class CheckpointRow:
    """One line of the table of checkpoints."""

    step: int
    size_bytes: int = 0
    save_s: float = 0.0
    verdict: CheckpointVerdict | None = None
    removed: str = ""


@dataclass
class FaultRow:
    """One line of the table of faults."""

    time_unix_s: float
    kind: str
    step: int
    detail: str
    recovered_s: float | None = None


@dataclass
class DecisionRow:
    """One line of the table of decisions."""

    segment_index: int
    from_step: int
    until_step: int
    decision: PolicyDecision


@dataclass
class RunBoard:
    """What the page shows. Counts are exact; tables keep the newest rows, curves a bounded number of points."""

    run_id: str
    total_steps: int
    view: View | None = None
    environment: EnvironmentReport | None = None
    checkpoints: dict[int, CheckpointRow] = field(default_factory=dict)
    faults: deque[FaultRow] = field(default_factory=lambda: deque(maxlen=NUM_FAULTS))
    decisions: deque[DecisionRow] = field(default_factory=lambda: deque(maxlen=NUM_DECISIONS))
    loss: Curve = field(default_factory=Curve)
    memory: Curve = field(default_factory=Curve)
    held_out: Curve = field(default_factory=Curve)
    evaluation: Evaluated | None = None
    samples: StepSamples | None = None
    segment: SegmentStarted | None = None
    ended: RunEnded | None = None
    attempt: int = 0
    step: int = 0
    validated_step: int = 0
    num_segments: int = 0
    num_faults: int = 0
    num_ooms_absorbed: int = 0
    num_decisions: int = 0
    num_validated: int = 0
    updated_unix_s: float = 0.0
    lived_before_s: float = 0.0
    began_unix_s: float = 0.0
    rate: Rate = field(default_factory=Rate)
    _line_unix_s: float = 0.0
    _sequence: int = -1

    def add_view(self, view: View, now_unix_s: float | None = None) -> None:
        """Where things are now. Between two steps (a restore, an evaluation) numbers are unknown: the newest known ones stay."""
        self.view = _with_known(view, self.view)
        self.updated_unix_s = time.time() if now_unix_s is None else now_unix_s
        if isinstance(view, ProgressView):
            self.total_steps = view.total_steps  # what was asked in epochs is known in steps only now
            self.step = view.step or self.step  # fresh workers say 0 until they have restored
            if view.step:
                self.rate.add(self.updated_unix_s, view.step)
            if view.loss is not None:
                self.loss.add(view.step, view.loss)
                self.memory.add(view.step, view.memory_bytes / 2**20 if view.memory_bytes else None)

    def draw_past(self, steps: Sequence[int], losses: Sequence[float], peak_bytes: Sequence[int]) -> None:
        """Curves of what earlier attempts did, instead of the few points that the journal has of them. Not empty."""
        newer = [[point for point in curve.points if point[0] > steps[-1]] for curve in (self.loss, self.memory)]
        self.loss, self.memory = Curve(), Curve()
        for step, loss, peak in zip(steps, losses, peak_bytes, strict=True):
            self.loss.add(step, loss)
            self.memory.add(step, peak / 2**20 if peak else None)
        for curve, points in zip((self.loss, self.memory), newer, strict=True):
            for step, value in points:
                curve.add(step, value)

    def add_line(self, line: JournalLine) -> bool:
        """Fold one line in; False where it was folded in before."""
        if line.sequence <= self._sequence:
            return False
        self._sequence = line.sequence
        self.updated_unix_s = line.time_unix_s
        if line.attempt != self.attempt:
            self.lived_before_s += max(0.0, self._line_unix_s - self.began_unix_s)
            self.attempt, self.ended, self.began_unix_s, self.rate = line.attempt, None, line.time_unix_s, Rate()
        self._line_unix_s = line.time_unix_s
        match line.event:
            case DoctorReported() as event:
                self.environment = event.report
            case SegmentStarted() as event:
                self.segment = event
            case SegmentEnded() as event:
                self._segment_ended(event)
            case CheckpointCommitted() | CheckpointJudged() | CheckpointRemoved() as event:
                self._checkpoint(event)
            case PolicyDecided() as event:
                self.num_decisions += 1
                self.decisions.append(DecisionRow(event.segment_index, event.plan.from_step, event.plan.until_step, event.decision))
            case FaultMet() as event:
                self.num_faults += 1
                self.faults.append(FaultRow(line.time_unix_s, event.kind, event.step, event.detail))
            case Recovered() as event:
                self._recovered(event)
            case Evaluated() as event:
                self.evaluation = event
                self.held_out.add(event.step, event.validation_loss)
            case Sampled() as event:
                self.samples = event.found
            case OomAbsorbed():
                self.num_ooms_absorbed += 1
            case RunEnded() as event:
                self.ended = event
            case _:
                pass
        return True

    def _segment_ended(self, event: SegmentEnded) -> None:
        if isinstance(event.outcome, SegmentCompleted):
            self.num_segments += 1
            self.step = event.outcome.to_step
            self.loss.add(event.outcome.to_step, event.outcome.loss_last)
            self.memory.add(event.outcome.to_step, event.outcome.peak_bytes / 2**20 if event.outcome.peak_bytes else None)

    def _checkpoint(self, event: CheckpointCommitted | CheckpointJudged | CheckpointRemoved) -> None:
        match event:
            case CheckpointCommitted():
                self.checkpoints[event.step] = CheckpointRow(event.step, event.size_bytes, event.duration_s)
            case CheckpointJudged():
                self.checkpoints.setdefault(event.verdict.step, CheckpointRow(event.verdict.step)).verdict = event.verdict
                if event.verdict.valid:
                    self.num_validated += 1
                    self.validated_step = max(self.validated_step, event.verdict.step)
            case CheckpointRemoved():
                if event.step in self.checkpoints:
                    self.checkpoints[event.step].removed = event.reason
        for step in sorted(self.checkpoints)[:-NUM_CHECKPOINTS]:
            del self.checkpoints[step]

    def _recovered(self, event: Recovered) -> None:
        for row in reversed(self.faults):
            if row.recovered_s is None and row.kind == event.kind:
                row.recovered_s = event.recovered_s
                return

    @property
    def elapsed_s(self) -> float:
        """Seconds in which an attempt lived, up to the newest sign of life; time between attempts is left out."""
        return self.lived_before_s + max(0.0, self.updated_unix_s - self.began_unix_s) if self.began_unix_s else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the rate of the last minute, pauses included; None where the run ended or no rate is known."""
        return None if self.ended is not None else self.rate.eta_s(self.total_steps - self.step)

    @property
    def percent(self) -> float:
        """Share of the applied steps that are done."""
        return min(100.0, 100.0 * self.step / self.total_steps) if self.total_steps else 0.0

    @property
    def preparing(self) -> PreparingView | None:
        """Set while data is being prepared."""
        return self.view if isinstance(self.view, PreparingView) else None


def _with_known(view: View, before: View | None) -> View:
    if not isinstance(view, ProgressView) or not isinstance(before, ProgressView):
        return view
    unknown = [name for name in ("loss", "learning_rate", "tokens_per_s", "memory_bytes") if getattr(view, name) is None]
    return replace(view, **{name: getattr(before, name) for name in unknown})
