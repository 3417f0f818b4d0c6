"""What the supervising loop does with each round of heartbeats: progress for people, recovery times, notices, once-a-second chores."""

import time
from dataclasses import dataclass, field

from mem_core.domain.events import Recovered
from mem_core.domain.run import LiveStep
from mem_core.domain.segment import SegmentFailure
from mem_core.infrastructure.machine.logs import LogFolder
from mem_core.infrastructure.telemetry.live import Rate, write_live
from mem_core.infrastructure.telemetry.progress import ProgressView
from mem_core.runtime.ranks.port import Heartbeat
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.live_ranks import Standing
from mem_core.runtime.session.notices import Notices
from mem_core.runtime.session.segment_outcomes import progress_view

EVERY_S = 1.0


@dataclass
class SegmentWatch:
    """One for an attempt."""

    attempt: Attempt
    standing: Standing
    memory_limit_bytes: int
    steps_per_epoch: float | None = None
    validation_loss: float | None = None
    notices: Notices = field(init=False)
    until_step: int = field(default=0, init=False)
    segment_index: int = field(default=0, init=False)
    _steps: Rate = field(default_factory=Rate)
    _tokens: Rate = field(default_factory=Rate)
    _fault: tuple[str, float] | None = None
    _last_chores_s: float = 0.0

    def __post_init__(self) -> None:
        self.notices = Notices(self.attempt.request.resilience, self.attempt.note)

    def failed(self, failure: SegmentFailure) -> None:
        """The clock of a recovery starts; it stops with the first step beyond where the fault sent the run back to."""
        self._fault = (failure.kind, time.monotonic())
        self.logs.bound()  # between two tries

    @property
    def logs(self) -> LogFolder:
        """What the run's processes say."""
        return LogFolder(self.attempt.state.folder / "logs")

    @property
    def recovering(self) -> bool:
        """Whether a fault has not been recovered from yet."""
        return self._fault is not None

    def on_beat(self, beats: list[Heartbeat], segment_index: int) -> None:
        """Take in what each rank last said, rank 0 first."""
        beat, standing, self.segment_index = beats[0], self.standing, segment_index
        standing.reached_batch = max(standing.reached_batch, beat.batch_index)
        standing.has_stepped |= standing.position is not None and beat.applied_steps > standing.position.applied_steps
        if self._fault is not None and standing.position is not None and beat.applied_steps > standing.position.applied_steps:
            kind, since_s = self._fault
            self._fault = None
            recovered_s = time.monotonic() - since_s
            self.attempt.state.emit(Recovered(kind=kind, step=standing.position.applied_steps, recovered_s=recovered_s))
        now_s = time.monotonic()
        if beat.step_s > 0:  # before the first step of a process its counts are not yet those of the run
            self._steps.add(now_s, beat.applied_steps)
            self._tokens.add(now_s, beat.tokens)
        view = progress_view(
            beats, self._tokens.per_s(), total_steps=self.attempt.request.training.max_steps, segment_index=segment_index,
            validated_step=standing.validated_step, restarts=standing.restarts, memory_limit_bytes=self.memory_limit_bytes,
            steps_per_epoch=self.steps_per_epoch, validation_loss=self.validation_loss,
        )  # fmt: skip
        self.attempt.progress.update(view)
        self.notices.look_for_stragglers(beats)
        if now_s - self._last_chores_s >= EVERY_S:
            self._last_chores_s = now_s
            self.attempt.stop.ask(self.notices.preempted())
            self.logs.bound()
            self._write_live(view)

    def _write_live(self, view: ProgressView) -> None:
        live = LiveStep(
            attempt=self.attempt.state.attempt, time_unix_s=time.time(), segment_index=view.segment_index, until_step=self.until_step,
            step=view.step, total_steps=view.total_steps, steps_per_s=self._steps.per_s(), tokens_per_s=view.tokens_per_s,
            left_s=self._steps.eta_s(view.total_steps - view.step), loss=view.loss, phase=view.phase,
        )  # fmt: skip
        write_live(self.attempt.state.folder, live)
