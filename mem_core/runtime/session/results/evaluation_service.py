"""Held-out rows between segments: looked at in the workers, recorded once for each step, and never a reason for training to change.

An evaluation belongs to a step that has a checkpoint: it runs beside the save of that step, with the weights that were saved. What
interrupts it costs the evaluation and nothing else, since it is done again from that checkpoint; what does not fit makes its own passes
smaller. Workers that die in it again and again are a reason to go on without it.
"""

import time
from dataclasses import dataclass, field

from mem_core.core.results.evaluations import EvaluationBook
from mem_core.domain.events import Evaluated, RunStoppedEarly
from mem_core.domain.results.evaluation import StoppedEarly
from mem_core.domain.segment import OutOfMemory, SegmentFailure, WorkerLost
from mem_core.runtime.ranks.port import Heartbeat
from mem_core.runtime.ranks.worker import protocol
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.segment_outcomes import SegmentFailed
from mem_core.runtime.session.segment_service import SegmentService

ONE_ROW = 1  # tokens of a pass: less than any row, and one row is always allowed
LAST_GRACE_S = 3.0  # after the last step a short evaluation makes the run complete; nobody who asks for an end waits for a long one


class EvaluationLeft(Exception):
    """Somebody asked for an end while rows were looked at."""


@dataclass
class EvaluationService:
    """One for an attempt. `has_sets`: whether there are rows to look at; `book` follows the journal."""

    attempt: Attempt
    segments: SegmentService
    has_sets: bool
    book: EvaluationBook
    _tries: dict[int, int] = field(default_factory=dict[int, int])
    _given_up: set[int] = field(default_factory=set[int])
    _most_tokens: int | None = None
    _asked_s: float | None = None

    def __post_init__(self) -> None:
        self._show()

    def is_done(self, step: int) -> bool:
        """Whether nothing is left to find out about a step."""
        return not self.has_sets or step in self._given_up or self.book.is_evaluated(step)

    def stop_due(self, step: int) -> StoppedEarly | None:
        """Why the run is to end at `step` though it has steps left; None where it goes on."""
        return self.book.stop_due(step, self.attempt.request.evaluation.patience)

    def stopped(self, step: int) -> None:
        """Say, once, why the run ends at `step`."""
        why = self.stop_due(step)
        if why is not None and self.book.stopped_early is None:
            self.attempt.state.emit(RunStoppedEarly(stopped=why))
            patience = self.attempt.request.evaluation.patience
            self.attempt.progress.note(f"stopped early after step {step:,}: {why.metric} has not fallen for {patience} evaluations")

    def evaluate(self, step: int, *, grace_s: float = 0.0) -> bool:
        """Look at the rows after `step`, once. False where it came to nothing: workers and position are gone then.

        It is left when somebody has asked for an end, `grace_s` after that was seen.
        """
        order = protocol.Evaluate(self.attempt.request.evaluation.max_rows, self._most_tokens)
        with self.attempt.ledger.bucket("evaluation"):
            try:
                found = self.segments.evaluate(order, lambda beats: self._on_beat(beats, grace_s))
            except EvaluationLeft:
                self.segments.checkpoints.wait_judged()  # the writers of the save beside it die with the workers
                self.segments.ranks.lose()
                return False
            except SegmentFailed as exc:
                self._failed(step, exc.failure)
                return False
        self._record(step, found)
        return True

    def _on_beat(self, beats: list[Heartbeat], grace_s: float) -> None:
        self.segments.watch.on_beat(beats, self.segments.watch.segment_index)
        if not self.attempt.stop:
            return
        now_s = time.monotonic()
        self._asked_s = now_s if self._asked_s is None else self._asked_s
        if now_s - self._asked_s >= grace_s:
            raise EvaluationLeft

    def _failed(self, step: int, failure: SegmentFailure) -> None:
        """Not counted with the failures of training: its plan, its batches and its bounds have no part in this."""
        self.segments.checkpoints.wait_judged()
        self._tries[step] = self._tries.get(step, 0) + 1
        if isinstance(failure, OutOfMemory | WorkerLost):
            self._most_tokens = ONE_ROW
        if self._tries[step] < self.attempt.request.resilience.max_failures_without_progress:
            self.attempt.progress.note(f"the evaluation after step {step:,} is done again")
            return
        self._give_up(step, "the workers died in each try")

    def _give_up(self, step: int, why: str) -> None:
        self._given_up.add(step)
        self.attempt.note(f"no evaluation after step {step:,}: {why}; every step is applied and proven all the same")

    def _record(self, step: int, found: protocol.Evaluated) -> None:
        for name in found.not_finite:
            self.attempt.note(f"step {step:,}: the loss of the set {name} is not finite")
        first = next(iter(found.figures), None)
        if first is None or next(iter(self.segments.ranks.setup.spec.evaluation_sets)) != first:
            self._give_up(step, "the loss of the first set is not finite")
            return
        figures = found.figures[first]
        self.attempt.state.emit(
            Evaluated(
                step=step, validation_loss=figures.loss, validation_rows=figures.rows, validation_rows_total=figures.rows_total,
                sets=found.figures,
            )
        )  # fmt: skip
        self.segments.checkpoints.write_evaluations(self.book.in_order)
        for name, each in found.figures.items():
            self.attempt.progress.note(f"step {step:,}: {name} {each.words()}")
        self._show()

    def _show(self) -> None:
        """The newest figure stays on the progress line."""
        newest = self.book.newest
        self.segments.watch.validation_loss = newest.validation_loss if newest is not None else None
