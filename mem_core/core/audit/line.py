"""What a journal says was committed, in the line of work that counts: going back drops what had been recorded beyond."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mem_core.core.run.reshard import is_shape_note
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import (
    BatchSkipped,
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointSealed,
    DoctorReported,
    Event,
    Forked,
    JournalLine,
    Noted,
    PolicyDecided,
    Resumed,
    SegmentEnded,
)
from mem_core.domain.plan import Hyperparams
from mem_core.domain.results.audit import AuditedOn
from mem_core.domain.segment import SegmentCompleted


@dataclass(frozen=True)
class Commit:
    """The state after `step` as the journal names it. `attempt` trained it; a digest is empty where an older version named none."""

    step: int
    weights_digest: str
    trajectory_digest: str
    attempt: int


@dataclass
class Told:
    """What a journal tells an auditor. Made by `told_by`.

    `commits` ascending by step; `first_step` is where the run began: 0, or that of the checkpoint that it was forked with. `losses`: step
    -> loss of the last step of a segment that ended there. `decided`: every value that a recorded decision let through.
    """

    first_step: int = 0
    commits: tuple[Commit, ...] = ()
    losses: dict[int, float] = field(default_factory=dict[int, float])
    left_out: frozenset[int] = frozenset()
    decided: frozenset[str] = frozenset()
    reshaped: bool = False
    reports: dict[int, EnvironmentReport] = field(default_factory=dict[int, EnvironmentReport])

    def trained_on(self, attempt: int) -> AuditedOn:
        """The machine of an attempt, as its doctor saw it; empty where the journal does not say."""
        report = self.reports.get(attempt)
        return AuditedOn(cpu=report.cpu, versions=report.versions) if report is not None else AuditedOn()

    def threads_of(self, num_ranks: int) -> int | None:
        """Threads that a rank had where a run of so many ranks began; None where no attempt had so many."""
        return next((report.threads_per_rank for _, report in sorted(self.reports.items()) if report.num_ranks == num_ranks), None)


def told_by(lines: Iterable[JournalLine]) -> Told:
    """Read a journal's lines, in order, once."""
    told, line = Told(), _Line()
    skipped, decided = set[int](), set[str]()
    for entry in lines:
        line.add(entry.event, entry.attempt)
        match entry.event:
            case DoctorReported(report=report):
                told.reports.setdefault(entry.attempt, report)
            case BatchSkipped(batch_index=index):
                skipped.add(index)
            case PolicyDecided(decision=decision):
                decided.add(key_of(decision.applied_hyperparams))
            case Noted(text=text) if is_shape_note(text):
                told.reshaped = True
            case Forked(origin=origin):
                told.first_step = origin.step
            case _:
                pass
    told.commits, told.losses = line.commits, line.losses
    told.left_out, told.decided = frozenset(skipped), frozenset(decided)
    return told


def key_of(hyperparams: Hyperparams) -> str:
    """Values that can be held against each other."""
    return hyperparams.model_dump_json()


class _Line:
    """Commits and last losses that count."""

    def __init__(self) -> None:
        self._commits: dict[int, Commit] = {}
        self._sealed: dict[int, int] = {}
        self.losses: dict[int, float] = {}

    @property
    def commits(self) -> tuple[Commit, ...]:
        return tuple(self._commits[step] for step in sorted(self._commits))

    def add(self, event: Event, attempt: int) -> None:
        """Take the next event."""
        match event:
            case CheckpointSealed():
                self._sealed[event.step] = attempt
            case CheckpointCommitted():
                self._go_back(event.step)
                self._commits[event.step] = Commit(event.step, event.weights_digest, event.trajectory_digest, attempt)
            case CheckpointJudged() if not event.verdict.valid:
                self._commits.pop(event.verdict.step, None)
            case Resumed():
                self._resume(event, attempt)
            case SegmentEnded(outcome=SegmentCompleted() as outcome) if outcome.to_step > outcome.from_step:
                self.losses = {step: loss for step, loss in self.losses.items() if step <= outcome.from_step}
                self.losses[outcome.to_step] = outcome.loss_last
            case _:
                pass

    def _resume(self, event: Resumed, attempt: int) -> None:
        """Work goes on from a checkpoint. One that was sealed by a process that died before it could say more was trained by that."""
        self._go_back(event.step)
        if event.step not in self._commits and (event.weights_digest or event.trajectory_digest):
            by = self._sealed.get(event.step, attempt)
            self._commits[event.step] = Commit(event.step, event.weights_digest, event.trajectory_digest, by)

    def _go_back(self, step: int) -> None:
        self._commits = {number: commit for number, commit in self._commits.items() if number <= step}
