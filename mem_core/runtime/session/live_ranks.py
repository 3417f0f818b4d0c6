"""The ranks of a run as they stand: forked, restored, at a position; or gone, and the next segment restores the last proven step."""

from dataclasses import dataclass, field
from pathlib import Path

from mem_core.core.recovery.deadlines import PhaseTimes
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.events import CheckpointJudged
from mem_core.infrastructure.telemetry.metrics import discard_metrics_after
from mem_core.runtime.ranks.port import RankGroup, Ranks, Watch
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence, WorkerSpec
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.checkpoint_service import CheckpointService
from mem_core.runtime.session.memory_service import MemoryService


@dataclass(frozen=True)
class RanksSetup:
    """From what ranks are made, the same for every try of an attempt. `fresh` is where a run without any checkpoint starts."""

    ranks: Ranks
    spec: WorkerSpec
    fresh: TrainingPosition
    memory_limit_bytes: int


@dataclass
class Standing:
    """How far a run has come, as this attempt knows it. Steps are applied updates.

    `position` is the engine's own, None where no sound engine lives; `highest_step` the furthest that was ever done, in any attempt;
    `reached_batch` the furthest batch that a rank has begun in this one: below it plans are replayed and not chosen.
    """

    position: TrainingPosition | None = None
    validated_step: int | None = None
    highest_step: int = 0
    reached_batch: int = 0
    restarts: int = 0


@dataclass
class LiveRanks:
    """Owns the worker group of a run and brings it to the right step before each segment."""

    attempt: Attempt
    setup: RanksSetup
    checkpoints: CheckpointService
    memory: MemoryService
    standing: Standing
    times: PhaseTimes = field(default_factory=PhaseTimes)
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _group: RankGroup | None = None
    _spent: RankGroup | None = None

    def locate(self) -> TrainingPosition:
        """Where the next segment starts: the engine's position, or that of the newest proven checkpoint."""
        if self.standing.position is None:
            self._resume_point()
        assert self.standing.position is not None
        return self.standing.position

    def _resume_point(self) -> tuple[Path | None, TrainingPosition]:
        folder, position = self.checkpoints.resume(self.setup.fresh, self._ever_validated)
        self.standing.position, self.standing.validated_step = position, position.applied_steps or None
        return folder, position

    def _ever_validated(self) -> bool:
        """Ever in the run's life: the fold forgets a step again once it was condemned."""
        return any(isinstance(line.event, CheckpointJudged) and line.event.verdict.valid for line in self.attempt.state.lines())

    def lose(self) -> None:
        """Discard workers and position (I5): the next segment restores the last validated step."""
        if self._group is not None:
            self._group.stop()
            self._group = None
        self.standing.position = None

    def spend(self) -> None:
        """No further step comes from these workers; they live on until their files are written and judged."""
        self._spent = self._group

    def ready(self, bucket: str) -> RankGroup:
        """Workers at the right step: those that live, else new ones from the newest proven checkpoint. Time goes into `bucket`.

        Raises:
            GroupFailed: they died on the way. StoreUnavailable, RunHeld, NoValidCheckpoint: there is nothing to restore from.
        """
        if self._group is not None and self.standing.position is not None and self._group is not self._spent:
            return self._group
        if self._group is not None and self._group is self._spent:
            self.checkpoints.wait_judged()  # its writers die with it
        self.lose()
        self.checkpoints.wait_idle()
        with self.attempt.ledger.bucket(bucket):
            return self._restore()

    def _restore(self) -> RankGroup:
        folder, position = self._resume_point()
        position = self.memory.restored(position)
        self.standing.position = None  # until the engine stands there
        watch = Watch(on_record=self.memory.record, memory_limit_bytes=self.setup.memory_limit_bytes, times=self.times)
        self._group = self.setup.ranks.start(self.setup.spec, watch)
        ready = self._group.restore(str(folder) if folder is not None else None, position, self.standing.reached_batch)
        self.parameters = ready.parameters
        self.standing.position = position
        self._drop_lost_metrics(position.applied_steps)
        return self._group

    def _drop_lost_metrics(self, step: int) -> None:
        """Rows of steps that are done again would otherwise stand twice in the plots."""
        try:
            discard_metrics_after(self.attempt.state.folder / "metrics", step)
        except OSError as exc:
            self.attempt.progress.note(f"old metrics could not be removed: {exc}")

    @property
    def group(self) -> RankGroup | None:
        """The workers, where any live."""
        return self._group

    def replay_evidence(self, step: int, deadline_s: float) -> ReplayEvidence | None:
        """What the live run did after the checkpoint of `step`; None where no engine stands behind it any more."""
        group = self._group
        if group is None:
            return None
        return group.wait_evidence(step, 1.0 if group is self._spent else deadline_s)
