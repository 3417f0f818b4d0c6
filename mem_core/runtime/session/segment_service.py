"""One try of a segment: workers ready at the right step, steps done, snapshot under way. Failures leave as one typed exception."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mem_core.core.recovery.deadlines import PhaseTimes
from mem_core.core.recovery.interval import RunPace
from mem_core.core.run.goodput import GoodputLedger
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.events import CheckpointJudged, Event, FaultMet, Noted, Recovered, SegmentEnded, SegmentStarted
from mem_core.domain.plan import Hyperparams
from mem_core.domain.segment import Evidence, NonFinite, SaveFailed, SegmentCompleted, SegmentFailure, SegmentInterrupted, describe_failure
from mem_core.infrastructure.telemetry.metrics import discard_metrics_after
from mem_core.infrastructure.telemetry.progress import Progress
from mem_core.runtime.ranks.port import GroupFailed, Heartbeat, RankGroup, Ranks, Watch
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence, SegmentDone, Train, WorkerSpec
from mem_core.runtime.session.checkpoint_service import CheckpointService, PendingSave
from mem_core.runtime.session.memory_service import MemoryService
from mem_core.runtime.session.notices import Notices
from mem_core.runtime.session.segment_outcomes import SegmentFailed, StopFlag, already_there, completed, progress_view
from mem_core.runtime.session.skip_list import SkipList

PROBE_STEPS = 2
__all__ = ["SegmentFailed", "SegmentService", "StopFlag"]


@dataclass
class SegmentService:
    """Owns the worker group of a run and brings it to the right step before each segment."""

    ranks: Ranks
    spec: WorkerSpec
    state: StateManager
    checkpoints: CheckpointService
    ledger: GoodputLedger
    progress: Progress
    fresh: TrainingPosition
    versions: dict[str, str]
    data_fingerprint: str
    memory_limit_bytes: int
    stop: StopFlag
    every_second: Callable[[], None] = lambda: None
    position: TrainingPosition | None = None
    validated_step: int | None = None
    restarts: int = 0
    highest_step: int = 0
    reached_batch: int = 0
    times: PhaseTimes = field(default_factory=PhaseTimes)
    pace: RunPace = field(default_factory=RunPace)
    failed_batches: frozenset[int] = frozenset()
    _memory: MemoryService | None = None
    _skips: SkipList | None = None
    _group: RankGroup | None = None
    _spent: RankGroup | None = None
    _fault: tuple[str, float] | None = None
    _last_second_s: float = field(default=0.0)
    _notices: Notices | None = None
    _parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def memory(self) -> MemoryService:
        """Recorded memory plans of the run."""
        if self._memory is None:
            self._memory = MemoryService(self.spec, self.state, self.progress)
        return self._memory

    @property
    def skips(self) -> SkipList:
        """Batches that are left out for good."""
        if self._skips is None:
            self._skips = SkipList(self.spec, self.state)
        return self._skips

    @property
    def notices(self) -> Notices:
        """Stragglers, preemption, spikes."""
        if self._notices is None:
            self._notices = Notices(self.spec.request.resilience, self._note)
        return self._notices

    def _emit(self, event: Event) -> None:
        self.state.emit(event)
        self.pace.add(event)

    def _note(self, text: str) -> None:
        self.state.emit(Noted(text=text))
        self.progress.note(text)

    # -- position -------------------------------------------------------------------------------------------------------

    def locate(self) -> TrainingPosition:
        """Where the next segment starts: the engine's position, or that of the newest proven checkpoint."""
        if self.position is None:
            _, self.position = self.checkpoints.resume(self.fresh, self._ever_validated)
            self.validated_step = self.position.applied_steps or None
        return self.position

    def _ever_validated(self) -> bool:
        """Ever in the run's life: the fold forgets a step again once it was condemned."""
        return any(isinstance(line.event, CheckpointJudged) and line.event.verdict.valid for line in self.state.lines())

    def lose_engine(self) -> None:
        """Discard workers and position (I5): the next segment restores the last validated step."""
        if self._group is not None:
            self._group.stop()
            self._group = None
        self.position = None

    def _ready_group(self) -> RankGroup:
        if self._group is not None and self.position is not None and self._group is not self._spent:
            return self._group
        if self._group is not None and self._group is self._spent:
            self.checkpoints.wait_judged()  # its writers die with it
        self.lose_engine()
        self.checkpoints.wait_idle()
        with self.ledger.bucket("restore" if self._fault is None else "restart"):
            folder, position = self.checkpoints.resume(self.fresh, self._ever_validated)
            self.validated_step = position.applied_steps or None
            position = self.memory.restored(position)
            watch = Watch(on_record=self.memory.record, memory_limit_bytes=self.memory_limit_bytes, times=self.times)
            self._group = self.ranks.start(self.spec, watch)
            ready = self._group.restore(str(folder) if folder is not None else None, position, self.reached_batch)
            self._parameters = ready.parameters
            self.position = position
            self._drop_lost_metrics(position.applied_steps)
        return self._group

    def _drop_lost_metrics(self, step: int) -> None:
        """Rows of steps that are done again would otherwise stand twice in the plots."""
        try:
            discard_metrics_after(self.state.folder / "metrics", step)
        except OSError as exc:
            self.progress.note(f"old metrics could not be removed: {exc}")

    # -- one try --------------------------------------------------------------------------------------------------------

    def train(
        self, segment_index: int, until_step: int, hyperparams: Hyperparams, try_number: int
    ) -> SegmentCompleted | SegmentInterrupted:
        """Train until `until_step` applied updates. The save goes on in the background; `CheckpointService.complete` ends it.

        Raises:
            SegmentFailed: classified, journaled, workers gone. StoreUnavailable and RunHeld pass through.
        """
        try:
            group = self._ready_group()
            position = self.locate()
            if position.applied_steps >= until_step:
                return already_there(position)
            staging = self.checkpoints.stage(until_step)
            self._emit(
                SegmentStarted(segment_index=segment_index, from_step=position.applied_steps, until_step=until_step, try_number=try_number)
            )
            done = self._drive(group, segment_index, until_step, hyperparams, staging)
        except GroupFailed as exc:
            raise self._failed(segment_index, exc.failure) from exc
        self._refuse_spike(segment_index, position, done)
        return self._completed(segment_index, position, done, staging, group)

    def _refuse_spike(self, segment_index: int, before: TrainingPosition, done: SegmentDone) -> None:
        """Where the user set a threshold: a segment with a loss beyond it is not saved, as if the loss had not been finite."""
        losses = [float(loss) for loss in done.columns["loss"]]
        found = self.notices.spike(losses)
        if found is None:
            return
        batch = int(done.columns["batch_index"][found])
        evidence = Evidence(rank=0, phase="step", batch_index=batch, exception=f"loss {losses[found]:.4g}")
        spike = NonFinite(what="loss_spike", batch_index=batch, sample_ids=self.skips.samples_of(batch), evidence=evidence)
        raise self._failed(segment_index, spike)

    def _drive(self, group: RankGroup, segment_index: int, until_step: int, hyperparams: Hyperparams, staging: Path) -> SegmentDone:
        self.ledger.enter("productive")
        section, step = self.spec.request.checkpoint, self.locate().applied_steps
        replay_of = (step or None) if section.validation == "replay" else None
        every_s = self.pace.interval_s(section.every_s, self.spec.request.training.max_steps - step)
        order = Train(until_step, hyperparams, str(staging), every_s=every_s, skip_batches=self.skips.batches, replay_of=replay_of)
        try:
            done = group.train(order, lambda beats: self._on_beat(beats, segment_index), lambda: bool(self.stop))
            self._on_beat(group.heartbeats(), segment_index)  # a quick segment may end between two looks
            return done
        finally:
            self.ledger.enter("idle")

    def probe_last(self) -> None:
        """After the last segment: two steps past the end, never saved, as evidence for the replay of the last checkpoint."""
        if self.spec.request.checkpoint.validation != "replay" or self._group is None or self.position is None:
            return
        step = self.position.applied_steps
        with self.ledger.bucket("validation_wait"):
            try:
                order = Train(step + PROBE_STEPS, self.position.hyperparams, staging=None, replay_of=step)
                self._group.train(order, lambda beats: None, lambda: False)
            except GroupFailed:
                self.progress.note("the workers died after the last segment; its replay goes without recorded steps")
        self._spent = self._group

    def replay_evidence(self, step: int, deadline_s: float) -> ReplayEvidence | None:
        """What the live run did after the checkpoint of `step`; None where no engine stands behind it any more."""
        group = self._group
        if group is None:
            return None
        return group.wait_evidence(step, 1.0 if group is self._spent else deadline_s)

    def _on_beat(self, beats: list[Heartbeat], segment_index: int) -> None:
        beat = beats[0]
        self.reached_batch = max(self.reached_batch, beat.batch_index)
        if self._fault is not None and self.position is not None and beat.applied_steps > self.position.applied_steps:
            kind, since_s = self._fault
            self._fault = None
            self.state.emit(Recovered(kind=kind, step=self.position.applied_steps, recovered_s=time.monotonic() - since_s))
        view = progress_view(
            beats, total_steps=self.spec.request.training.max_steps, segment_index=segment_index, validated_step=self.validated_step,
            restarts=self.restarts, memory_limit_bytes=self.memory_limit_bytes,
        )  # fmt: skip
        self.progress.update(view)
        self.notices.look_for_stragglers(beats)
        now = time.monotonic()
        if now - self._last_second_s >= 1.0:
            self._last_second_s = now
            self.stop.by = self.stop.by or self.notices.preempted()
            self.every_second()

    # -- endings --------------------------------------------------------------------------------------------------------

    def _completed(
        self, segment_index: int, before: TrainingPosition, done: SegmentDone, staging: Path, group: RankGroup
    ) -> SegmentCompleted | SegmentInterrupted:
        self.position = done.position
        step = done.position.applied_steps
        self.ledger.move("productive", "save_stall", done.save_stall_s)
        redone = min(self.highest_step, step) - before.applied_steps
        if redone > 0:
            self.ledger.move("productive", "redone", done.duration_s * redone / max(1, step - before.applied_steps))
        self.highest_step = max(self.highest_step, step)
        self.checkpoints.register(PendingSave(step, staging, group, done, self.versions, self.data_fingerprint, self._parameters))
        outcome = completed(before, done)
        self._emit(SegmentEnded(segment_index=segment_index, outcome=outcome))
        self._emit(self.ledger.drain())
        if done.replace_reason:
            self._note(f"memory: the workers are replaced before the next segment: {done.replace_reason}")
            self._spent = group
        if done.interrupted and self.stop:
            self._spent = group  # no further step will come from it
            return SegmentInterrupted(by=self.stop.by, to_step=step)
        return outcome

    def _failed(self, segment_index: int, failure: SegmentFailure) -> SegmentFailed:
        self.ledger.move("productive", "redone", 1e12)  # what the lost try did is done again
        self.ledger.enter("restart")
        self._fault = (failure.kind, time.monotonic())
        if failure.evidence.batch_index is not None:
            self.failed_batches |= {failure.evidence.batch_index}
        self.restarts += 1
        self.lose_engine()
        self.validated_step = self._proven_step() or None
        self._emit(SegmentEnded(segment_index=segment_index, outcome=failure))
        self._emit(FaultMet(kind=failure.kind, step=self.validated_step or 0, detail=describe_failure(failure)))
        self._emit(self.ledger.drain())
        self.progress.note(f"{describe_failure(failure)}; going on from step {self.validated_step or 0}")
        return SegmentFailed(failure)

    def _proven_step(self) -> int:
        """Newest step with a good verdict, a save in flight included: where the next try starts."""
        self.checkpoints.wait_idle()
        return max((info.step for info in self.checkpoints.manager.listing() if info.state == "valid"), default=0)

    def save_failed(self, segment_index: int, problem: str) -> SegmentFailure:
        """Journal a save that came to nothing while the engine stayed sound."""
        failure = SaveFailed(evidence=Evidence(phase="save", exception=problem[:500]))
        self._emit(SegmentEnded(segment_index=segment_index, outcome=failure))
        self.progress.note(f"{describe_failure(failure)}; the older checkpoint stays current and training goes on")
        return failure

    def evaluate(self, max_batches: int = 16) -> float:
        """Validation loss of the engine as it stands. Raises SegmentFailed."""
        with self.ledger.bucket("evaluation"):
            try:
                return self._ready_group().evaluate(max_batches)
            except GroupFailed as exc:
                raise self._failed(0, exc.failure) from exc

    def close(self) -> None:
        """End the workers."""
        self.lose_engine()
