"""Held-out rows between segments: looked at in the workers, recorded once for each step, and never a reason for training to change.

What interrupts an evaluation, and what follows when it fails: `beside_training.py`. What does not fit makes its own passes smaller.
"""

from dataclasses import dataclass, field

from mem_core.core.results.evaluations import EvaluationBook
from mem_core.domain.events import Evaluated, RunStoppedEarly
from mem_core.domain.results.evaluation import StoppedEarly
from mem_core.runtime.ranks.worker import protocol
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.results.beside_training import BesideTraining
from mem_core.runtime.session.segment_service import SegmentService

LAST_GRACE_S = 3.0  # after the last step a short evaluation makes the run complete; nobody who asks for an end waits for a long one


@dataclass
class EvaluationService:
    """One for an attempt. `has_sets`: whether there are rows to look at; `book` follows the journal."""

    attempt: Attempt
    segments: SegmentService
    has_sets: bool
    book: EvaluationBook
    _beside: BesideTraining = field(init=False)

    def __post_init__(self) -> None:
        self._beside = BesideTraining(self.attempt, self.segments, "evaluation")
        self._show()

    def is_done(self, step: int) -> bool:
        """Whether nothing is left to find out about a step."""
        return not self.has_sets or self._beside.is_given_up(step) or self.book.is_evaluated(step)

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
        order = protocol.Evaluate(self.attempt.request.evaluation.max_rows, self._beside.most_tokens)
        found = self._beside.ask(step, lambda group, on_beat: group.evaluate(order, on_beat), grace_s)
        if found is not None:
            self._record(step, found)
        return found is not None

    def _record(self, step: int, found: protocol.Evaluated) -> None:
        for name in found.not_finite:
            self.attempt.note(f"step {step:,}: the loss of the set {name} is not finite")
        first = next(iter(found.figures), None)
        if first is None or next(iter(self.segments.ranks.setup.spec.evaluation_sets)) != first:
            self._beside.give_up(step, "the loss of the first set is not finite")
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
