"""The ranks of a run as they stand: forked, restored, at a position; or gone, and the next segment restores the last proven step."""

from dataclasses import dataclass, field

from mem_core.core.recovery.deadlines import PhaseTimes
from mem_core.core.run.belonging import CheckpointWords
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.events import CheckpointJudged, Resumed
from mem_core.domain.segment import SegmentFailure
from mem_core.runtime.ranks.port import GroupFailed, RankGroup, Ranks, Watch
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence, WorkerSpec
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.checkpoint_service import CheckpointService, ResumePoint
from mem_core.runtime.session.memory_service import MemoryService


@dataclass(frozen=True)
class RanksSetup:
    """From what ranks are made, the same for every try of an attempt. `fresh` is where a run without any checkpoint
    starts; `times` carries what was learned about deadlines from one try to the next."""

    ranks: Ranks
    spec: WorkerSpec
    fresh: TrainingPosition
    memory_limit_bytes: int
    times: PhaseTimes = field(default_factory=PhaseTimes)


@dataclass
class Standing:
    """How far a run has come, as this attempt knows it. Steps are applied updates.

    `position` is the engine's own, None where no sound engine lives; `highest_step` the furthest that was ever done, in any attempt;
    `reached_batch` the furthest batch that a rank has begun in this one: below it plans are replayed and not chosen.
    `has_stepped`: whether any process of this attempt applied a step.
    """

    position: TrainingPosition | None = None
    validated_step: int | None = None
    highest_step: int = 0
    reached_batch: int = 0
    restarts: int = 0
    has_stepped: bool = False


def _while_loading(failure: SegmentFailure, step: int | None) -> SegmentFailure:
    """The failure with the checkpoint named that was being loaded, where loading is what failed."""
    if step is None or failure.evidence.phase != "restore":
        return failure
    return failure.model_copy(update={"evidence": failure.evidence.model_copy(update={"restoring_step": step})})


@dataclass
class LiveRanks:
    """Owns the worker group of a run and brings it to the right step before each segment."""

    attempt: Attempt
    setup: RanksSetup
    checkpoints: CheckpointService
    memory: MemoryService
    standing: Standing
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _group: RankGroup | None = None
    _spent: RankGroup | None = None
    _told_step: int | None = None
    _passed_over: dict[int, str] = field(default_factory=dict[int, str])

    def locate(self) -> TrainingPosition:
        """Where the next segment starts: the engine's position, or that of the newest proven checkpoint."""
        if self.standing.position is None:
            self._resume_point()
        assert self.standing.position is not None
        return self.standing.position

    def _resume_point(self) -> ResumePoint:
        point = self.checkpoints.resume(self.setup.fresh, self._ever_validated, self._passed_over)
        self.standing.position, self.standing.validated_step = point.position, point.position.applied_steps or None
        self._tell_where(point)
        return point

    def _tell_where(self, point: ResumePoint) -> None:
        """Journal what is taken up, once; and say what was proven in this run's life and lies nowhere any more."""
        position, first = point.position, self._told_step is None
        if position.applied_steps == self._told_step:
            return
        self._told_step = position.applied_steps
        if point.folder is not None:
            self.attempt.state.emit(
                Resumed(
                    step=position.applied_steps,
                    batch_index=position.batch_index,
                    tokens=position.tokens,
                    weights_digest=point.weights_digest,
                    trajectory_digest=position.trajectory_digest,
                )
            )
        words = CheckpointWords(line.event for line in self.attempt.state.lines()) if first else CheckpointWords()
        missing = words.proven_beyond(position.applied_steps)
        if missing:
            steps = f"step{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
            self.attempt.note(
                f"the journal says that {steps} had been proven, and no copy of that was found: "
                f"going on from step {position.applied_steps}, what came after it is done again"
            )

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
        self.attempt.state.await_store()  # ranks make folders of their own in it
        self.checkpoints.wait_idle()
        with self.attempt.ledger.bucket(bucket):
            return self._restore()

    def _restore(self) -> RankGroup:
        point = self._resume_point()
        folder, position = point.folder, self.memory.restored(point.position)
        self.standing.position = None  # until the engine stands there
        watch = Watch(on_record=self.memory.record, memory_limit_bytes=self.setup.memory_limit_bytes, times=self.setup.times)
        self._group = self.setup.ranks.start(self.memory.configured(self.setup.spec), watch)
        try:
            ready = self._group.restore(str(folder) if folder is not None else None, position, self.standing.reached_batch)
        except GroupFailed as exc:
            raise GroupFailed(_while_loading(exc.failure, position.applied_steps if folder is not None else None)) from exc
        self.parameters = ready.parameters
        self.standing.position = position
        self._set_aside_what_did_not_load(position.applied_steps)
        self.checkpoints.results.rewind(position.applied_steps)  # rows of steps that are done again would stand twice
        return self._group

    # -- checkpoints that cannot be loaded ------------------------------------------------------------------------------

    @property
    def passed_over(self) -> tuple[int, ...]:
        """Steps whose checkpoints could not be loaded and are left out meanwhile, ascending."""
        return tuple(sorted(self._passed_over))

    def can_fall_back(self, step: int | None) -> bool:
        """Whether there is a proven checkpoint older than that of `step`."""
        infos = self.checkpoints.manager.listing() if step is not None else ()
        return any(info.state == "valid" and info.step < (step or 0) and info.step not in self._passed_over for info in infos)

    def pass_over(self, step: int, reason: str) -> None:
        """Try an older checkpoint than that of `step` from now on. It is set aside when an older one is loaded, and not before."""
        self._passed_over[step] = reason

    def _set_aside_what_did_not_load(self, loaded_step: int) -> None:
        for step, reason in sorted(self._passed_over.items()):
            self.checkpoints.manager.set_aside(step, f"the engine cannot load it: {reason}")
            then = f"it is in quarantine, going on from step {loaded_step}"
            self.attempt.note(f"the checkpoint of step {step} is whole and cannot be loaded ({reason}); {then}")
        self._passed_over.clear()

    # -------------------------------------------------------------------------------------------------------------------

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
