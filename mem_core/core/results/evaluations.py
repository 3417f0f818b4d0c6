"""What evaluations say of a run: which step was best, whether the loss still falls, what is left to evaluate. Folded from events, pure."""

from collections.abc import Iterable

from mem_core.domain.errors import RequestError
from mem_core.domain.events import (
    CheckpointCommitted,
    CheckpointJudged,
    Evaluated,
    Event,
    JournalLine,
    RunStoppedEarly,
    SegmentStarted,
)
from mem_core.domain.request import VALIDATION
from mem_core.domain.results.evaluation import BestStep, StoppedEarly

METRIC = "loss"


class EvaluationBook:
    """Events in order through `add`. What was evaluated beyond the step that work goes on from is forgotten: it is done again.

    The first set of an evaluation decides; the lowest loss is best, of two the same the earlier one. Only a step whose checkpoint was
    committed, and not condemned since, can be the best.
    """

    def __init__(self, lines: Iterable[JournalLine] = ()) -> None:
        self._evaluated: dict[int, Evaluated] = {}
        self._saved: set[int] = set()
        self.stopped_early: StoppedEarly | None = None
        for line in lines:
            self.add(line.event)

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case Evaluated():
                self._evaluated[event.step] = event
            case SegmentStarted():
                self._evaluated = {step: found for step, found in self._evaluated.items() if step <= event.from_step}
                self.stopped_early = None
            case CheckpointCommitted():
                self._saved.add(event.step)
            case CheckpointJudged() if not event.verdict.valid:
                self._saved.discard(event.verdict.step)
            case RunStoppedEarly():
                self.stopped_early = event.stopped
            case _:
                pass

    def is_evaluated(self, step: int) -> bool:
        """Whether the figures of a step are known."""
        return step in self._evaluated

    @property
    def newest(self) -> Evaluated | None:
        """The last one."""
        return self._evaluated[max(self._evaluated)] if self._evaluated else None

    @property
    def in_order(self) -> tuple[Evaluated, ...]:
        """Every one that counts, ascending by step."""
        return tuple(self._evaluated[step] for step in sorted(self._evaluated))

    def best(self) -> BestStep | None:
        """The step with the lowest loss; None before the first evaluation of a step that has a checkpoint."""
        saved = (event for event in self.in_order if event.step in self._saved)
        found = min(saved, key=lambda event: event.validation_loss, default=None)
        return None if found is None else BestStep(step=found.step, metric=metric_of(found), value=found.validation_loss)

    def held(self) -> frozenset[int]:
        """Steps whose checkpoints must stay where the best one is kept."""
        best = self.best()
        return frozenset() if best is None else frozenset({best.step})

    def stop_due(self, step: int, patience: int | None) -> StoppedEarly | None:
        """Why a run that stands at `step` is to end; None where it goes on. The best step and those after it are counted up to `step`."""
        seen = [event for event in self.in_order if event.step <= step]
        if patience is None or not seen or seen[-1].step != step:
            return None
        best = min(range(len(seen)), key=lambda index: seen[index].validation_loss)
        return StoppedEarly(step=step, metric=metric_of(seen[-1])) if len(seen) - 1 - best >= patience else None


def best_step(lines: Iterable[JournalLine], field: str, otherwise: str) -> int:
    """The step that was best. Raises RequestError, naming the `field` that asks for it and what can be given `otherwise`: there is none."""
    best = EvaluationBook(lines).best()
    if best is None:
        raise RequestError(
            "this run has no best step: held-out rows were never looked at", field=field,
            remedy=f"Give {otherwise}, or train with evaluation.every_steps and evaluation.keep_best.",
        )  # fmt: skip
    return best.step


def metric_of(event: Evaluated) -> str:
    """`validation/loss`: the set that decides, and what of it."""
    return f"{next(iter(event.sets), VALIDATION)}/{METRIC}"
