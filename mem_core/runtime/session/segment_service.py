"""One try of a segment: workers ready at the right step, steps done, snapshot under way. Failures leave as one typed exception."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mem_core.core.recovery.interval import RunPace
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.events import Event, FaultMet, SegmentEnded, SegmentStarted
from mem_core.domain.plan import Hyperparams
from mem_core.domain.segment import (
    Evidence,
    NonFinite,
    SaveFailed,
    SegmentCompleted,
    SegmentFailure,
    SegmentInterrupted,
    describe_failure,
    last_words,
)
from mem_core.runtime.ranks.port import GroupFailed, RankGroup
from mem_core.runtime.ranks.worker.protocol import SegmentDone, Train
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.checkpoint_service import BornWith, CheckpointService, PendingSave
from mem_core.runtime.session.live_ranks import LiveRanks, Standing
from mem_core.runtime.session.segment_outcomes import SegmentFailed, already_there, completed, with_last_step
from mem_core.runtime.session.segment_watch import SegmentWatch
from mem_core.runtime.session.skip_list import SkipList

PROBE_STEPS = 2
Answer = TypeVar("Answer")


@dataclass
class SegmentService:
    """Trains one segment at a time and says how it ended. `failed_batches`: those that failed at any time in this attempt."""

    attempt: Attempt
    ranks: LiveRanks
    checkpoints: CheckpointService
    skips: SkipList
    watch: SegmentWatch
    pace: RunPace
    born_with: BornWith
    failed_batches: frozenset[int] = frozenset()
    _told_uncompiled: bool = False

    @property
    def standing(self) -> Standing:
        """How far the run has come."""
        return self.ranks.standing

    def _emit(self, event: Event) -> None:
        self.attempt.state.emit(event)
        self.pace.add(event)

    def _ready_group(self) -> RankGroup:
        return self.ranks.ready("restart" if self.watch.recovering else "restore")

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
            position = self.ranks.locate()
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
        found = self.watch.notices.spike(losses)
        if found is None:
            return
        batch = int(done.columns["batch_index"][found])
        evidence = Evidence(rank=0, phase="step", batch_index=batch, exception=f"loss {losses[found]:.4g}")
        spike = NonFinite(what="loss_spike", batch_index=batch, sample_ids=self.skips.samples_of(batch), evidence=evidence)
        raise self._failed(segment_index, spike)

    def _drive(self, group: RankGroup, segment_index: int, until_step: int, hyperparams: Hyperparams, staging: Path) -> SegmentDone:
        self.attempt.ledger.enter("productive")
        self.watch.until_step = until_step
        section, step = self.attempt.request.checkpoint, self.ranks.locate().applied_steps
        replay_of = (step or None) if section.validation == "replay" else None
        every_s = self.pace.interval_s(section.every_s, self.attempt.request.training.max_steps - step)
        order = Train(until_step, hyperparams, str(staging), every_s=every_s, skip_batches=self.skips.batches, replay_of=replay_of)
        try:
            done = group.train(order, lambda beats: self.watch.on_beat(beats, segment_index), lambda: bool(self.attempt.stop))
            self.watch.on_beat(with_last_step(group.heartbeats(), done), segment_index)  # it may end between two looks
            return done
        finally:
            self.attempt.ledger.enter("idle")

    def probe_last(self) -> None:
        """After the last segment: two steps past the end, never saved, as evidence for the replay of the last checkpoint."""
        group, position = self.ranks.group, self.standing.position
        if self.attempt.request.checkpoint.validation != "replay" or group is None or position is None:
            return
        step = position.applied_steps
        with self.attempt.ledger.bucket("validation_wait"):
            try:
                order = Train(step + PROBE_STEPS, position.hyperparams, staging=None, replay_of=step)
                group.train(order, lambda beats: None, lambda: False)
            except GroupFailed:
                self.attempt.progress.note("the workers died after the last segment; its replay goes without recorded steps")
        self.ranks.spend()

    # -- endings --------------------------------------------------------------------------------------------------------

    def _completed(
        self, segment_index: int, before: TrainingPosition, done: SegmentDone, staging: Path, group: RankGroup
    ) -> SegmentCompleted | SegmentInterrupted:
        self.standing.position = done.position
        self.standing.has_stepped = True
        step = done.position.applied_steps
        self.attempt.ledger.move("productive", "save_stall", done.save_stall_s)
        redone = min(self.standing.highest_step, step) - before.applied_steps
        if redone > 0:
            self.attempt.ledger.move("productive", "redone", done.duration_s * redone / max(1, step - before.applied_steps))
        self.standing.highest_step = max(self.standing.highest_step, step)
        self.checkpoints.register(PendingSave(step, staging, group, done, self.born_with, self.ranks.parameters))
        outcome = completed(before, done)
        self._emit(SegmentEnded(segment_index=segment_index, outcome=outcome))
        self._emit(self.attempt.ledger.drain())
        if done.uncompiled_passes:
            self._tell_uncompiled(done)
        if done.replace_reason:
            self.attempt.note(f"memory: the workers are replaced before the next segment: {done.replace_reason}")
            self.ranks.spend()
        if done.interrupted and self.attempt.stop:
            self.ranks.spend()  # no further step will come from it
            return SegmentInterrupted(by=self.attempt.stop.by, to_step=step)
        return outcome

    def _tell_uncompiled(self, done: SegmentDone) -> None:
        """Once in an attempt: how often does not matter to the result, since the sizes of a pass alone decide it."""
        if not self._told_uncompiled:
            self._told_uncompiled = True
            self.attempt.note(
                f"{done.uncompiled_passes} passes of this segment were not compiled: they recompute activations, or no compiled version "
                "fits their sizes; the same passes are never compiled anywhere, so nothing changes but the time"
            )

    def _failed(self, segment_index: int, failure: SegmentFailure) -> SegmentFailed:
        self.attempt.ledger.move("productive", "redone", 1e12)  # what the lost try did is done again
        self.attempt.ledger.enter("restart")
        self.watch.failed(failure)
        if failure.evidence.batch_index is not None:
            self.failed_batches |= {failure.evidence.batch_index}
        self.standing.restarts += 1
        self.ranks.lose()
        self.standing.validated_step = self._proven_step() or None
        self._emit(SegmentEnded(segment_index=segment_index, outcome=failure))
        self._emit(FaultMet(kind=failure.kind, step=self.standing.validated_step or 0, detail=describe_failure(failure)))
        self._emit(self.attempt.ledger.drain())
        said = last_words(failure.evidence)
        if said:
            self.attempt.progress.note(said)
        self.attempt.progress.note(f"{describe_failure(failure)}; going on from step {self.standing.validated_step or 0}")
        return SegmentFailed(failure)

    def _proven_step(self) -> int:
        """Newest step with a good verdict, a save in flight included: where the next try starts."""
        self.checkpoints.wait_idle()
        return max((info.step for info in self.checkpoints.manager.listing() if info.state == "valid"), default=0)

    def save_failed(self, segment_index: int, problem: str) -> SegmentFailure:
        """Journal a save that came to nothing while the engine stayed sound."""
        failure = SaveFailed(evidence=Evidence(phase="save", exception=problem[:500]))
        self._emit(SegmentEnded(segment_index=segment_index, outcome=failure))
        self.attempt.progress.note(f"{describe_failure(failure)}; the older checkpoint stays current and training goes on")
        return failure

    def between(self, order: Callable[[RankGroup], Answer]) -> Answer:
        """What the workers answer under the engine as it stands. Raises SegmentFailed, and what the order raises."""
        try:
            return order(self._ready_group())
        except GroupFailed as exc:
            raise self._failed(0, exc.failure) from exc

    def close(self) -> None:
        """End the workers."""
        self.ranks.lose()
