"""How a stretch was trained, from what a later checkpoint remembers: which values held from where on, and what was left out."""

from collections.abc import Collection
from dataclasses import dataclass

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.plan import Hyperparams


@dataclass(frozen=True)
class Piece:
    """Train until `until_step` applied updates under these values."""

    until_step: int
    hyperparams: Hyperparams


@dataclass(frozen=True)
class Course:
    """The pieces of a stretch in order, the index after its last batch, and the batches in it that the engine never saw."""

    pieces: tuple[Piece, ...]
    end_batch: int
    left_out: tuple[int, ...]


def course_of(start: TrainingPosition, to_step: int, later: TrainingPosition, left_out: Collection[int]) -> Course:
    """From `start` to `to_step` as the run went there. `later`: a position at or beyond `to_step`, whose histories say under which values
    every batch ran and which updates were skipped; `left_out`: batches that the journal says were left out for good.
    """
    skipped = frozenset(later.skipped_batches)
    changes = dict(later.hyperparams_history)
    index, step = start.batch_index, start.applied_steps
    values = hyperparams_at(later, index)
    pieces: list[Piece] = []
    while step < to_step:
        if index in changes and changes[index] != values:
            pieces.append(Piece(step, values))
            values = changes[index]
        step += index not in skipped
        index += 1
    pieces.append(Piece(to_step, values))
    began = start.applied_steps
    kept = [piece for number, piece in enumerate(pieces) if piece.until_step > (pieces[number - 1].until_step if number else began)]
    passed = tuple(sorted(number for number in skipped.intersection(left_out) if start.batch_index <= number < index))
    return Course(tuple(kept), index, passed)


def hyperparams_at(later: TrainingPosition, batch_index: int) -> Hyperparams:
    """The values under which a batch ran, from the history in a later checkpoint."""
    found = [values for first, values in later.hyperparams_history if first <= batch_index]
    return found[-1] if found else later.hyperparams


def plan_changes_within(later: TrainingPosition, start_batch: int, end_batch: int) -> int:
    """How many recorded changes of the micro-batch plan fall on batches of a stretch."""
    return sum(start_batch <= change.batch_index < end_batch for change in later.memory_plan_changes)
