"""What is asked of the workers between segments, beside training: tried a few times, left when somebody asks for an end, never fatal.

It belongs to a step that has a checkpoint, or to step 0: it runs beside the save of that step, with the weights that were saved. What
interrupts it costs it and nothing else, since it is done again from that checkpoint. Workers that die in it again and again are a reason
to go on without it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from mem_core.domain.segment import OutOfMemory, WorkerLost
from mem_core.runtime.ranks.port import Heartbeat, RankGroup
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.segment_outcomes import SegmentFailed
from mem_core.runtime.session.segment_service import SegmentService

ONE_ROW = 1  # tokens of a pass: less than any row, and one row is always allowed
OnBeat = Callable[[list[Heartbeat]], None]
Answer = TypeVar("Answer")


class Left(Exception):
    """Somebody asked for an end meanwhile."""


@dataclass
class BesideTraining:
    """One kind of work. `name` is what people call it: `evaluation`. `most_tokens` bounds a pass, where one did not fit."""

    attempt: Attempt
    segments: SegmentService
    name: str
    most_tokens: int | None = None
    _tries: dict[int, int] = field(default_factory=dict[int, int])
    _given_up: set[int] = field(default_factory=set[int])
    _asked_s: float | None = None

    def is_given_up(self, step: int) -> bool:
        """Whether it was tried often enough."""
        return step in self._given_up

    def give_up(self, step: int, why: str) -> None:
        """Go on without it, and say so."""
        self._given_up.add(step)
        when = f"after step {step:,}" if step else "before training"
        self.attempt.note(f"no {self.name} {when}: {why}; every step is applied and proven all the same")

    def ask(self, step: int, order: Callable[[RankGroup, OnBeat], Answer], grace_s: float) -> Answer | None:
        """The workers' answer. None where it came to nothing: workers and position are gone then.

        It is left when somebody has asked for an end, `grace_s` after that was seen.
        """
        with self.attempt.ledger.bucket("evaluation"):
            try:
                return self.segments.between(lambda group: order(group, lambda beats: self._on_beat(beats, grace_s)))
            except Left:
                self.segments.checkpoints.wait_judged()  # the writers of the save beside it die with the workers
                self.segments.ranks.lose()
            except SegmentFailed as exc:
                self._failed(step, exc)
        return None

    def _on_beat(self, beats: list[Heartbeat], grace_s: float) -> None:
        self.segments.watch.on_beat(beats, self.segments.watch.segment_index)
        if not self.attempt.stop:
            return
        now_s = time.monotonic()
        self._asked_s = now_s if self._asked_s is None else self._asked_s
        if now_s - self._asked_s >= grace_s:
            raise Left

    def _failed(self, step: int, failed: SegmentFailed) -> None:
        """Not counted with the failures of training: its plan, its batches and its bounds have no part in this."""
        self.segments.checkpoints.wait_judged()
        self._tries[step] = self._tries.get(step, 0) + 1
        if isinstance(failed.failure, OutOfMemory | WorkerLost):
            self.most_tokens = ONE_ROW
        if self._tries[step] < self.attempt.request.resilience.max_failures_without_progress:
            self.attempt.progress.note(f"the {self.name} {f'after step {step:,}' if step else 'before training'} is done again")
            return
        self.give_up(step, "the workers died in each try")
