"""What of the origin's journal a fork takes along, beside the checkpoint. Pure.

A fork that goes on as the origin did takes what was decided for steps that are still to come: how their batches are split, which are
left out, what each segment runs with. One that changes something decides for itself from there on.
"""

from collections.abc import Iterable, Iterator

from mem_core.core.fork.changes import Branch
from mem_core.core.results.evaluations import EvaluationBook
from mem_core.core.results.samples import SampleBook
from mem_core.core.run.fold import fold_state
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.events import BatchSkipped, Evaluated, Event, JournalLine, MemoryPlanChanged, PolicyDecided, Sampled


def carried_events(lines: Iterable[JournalLine], position: TrainingPosition, branch: Branch) -> tuple[Event, ...]:
    """Events for the fork's own journal, in an order in which they can be folded."""
    lines = list(lines)
    return (
        *_evaluations(lines, position.applied_steps, branch),
        *_samples(lines, position.applied_steps, branch),
        *_left_out(lines, position, branch),
        *_decisions(lines, position.applied_steps, branch),
        *_splits(lines, position, branch),
    )


def _evaluations(lines: list[JournalLine], step: int, branch: Branch) -> tuple[Evaluated, ...]:
    """Figures up to the step, so that curves are whole and patience counts on; not beside figures of other rows."""
    if any(change.field in ("evaluation.max_rows", "evaluation.sets") or change.field.startswith("evaluation.sets.")
           for change in branch.changes):  # fmt: skip
        return ()
    return tuple(event for event in EvaluationBook(lines).in_order if event.step <= step)


def _samples(lines: list[JournalLine], step: int, branch: Branch) -> tuple[Sampled, ...]:
    """Answers up to the step; not beside answers to other prompts."""
    names = ("evaluation.prompts", "evaluation.sample_tokens", "evaluation.sample_temperature")
    if any(change.field in names for change in branch.changes):
        return ()
    return tuple(Sampled(found=found) for found in SampleBook(lines).in_order if found.step <= step)


def _left_out(lines: list[JournalLine], position: TrainingPosition, branch: Branch) -> Iterator[BatchSkipped]:
    for line in lines:
        if isinstance(line.event, BatchSkipped) and (branch.same_course or line.event.batch_index < position.batch_index):
            yield line.event


def _decisions(lines: list[JournalLine], step: int, branch: Branch) -> Iterator[PolicyDecided]:
    """Without a planner the first decision of a run stands for every segment, so that one which was changed must take its own."""
    has_planner = branch.request.policy.planner.kind != "none"
    index = step // branch.request.effective_segment_steps
    for line in lines:
        if isinstance(line.event, PolicyDecided) and (branch.same_course or (has_planner and line.event.segment_index < index)):
            yield line.event


def _splits(lines: list[JournalLine], position: TrainingPosition, branch: Branch) -> Iterator[MemoryPlanChanged]:
    """Earlier ones stand in the position itself."""
    if branch.same_course:
        for change in fold_state(lines).memory_plan_changes:
            if change.batch_index >= position.batch_index:
                yield MemoryPlanChanged(change=change)
