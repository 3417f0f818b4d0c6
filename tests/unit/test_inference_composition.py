"""Which prompts are answered together, what is remembered of it, and draws that depend on seed, row and position alone."""

from collections.abc import Callable

import pytest

from mem_core.core.inference.composition import ModelShape, Sizing, longest_first
from mem_core.core.inference.draws import draw
from mem_core.core.inference.recorded import Composed, DidNotFit, changes, recorded

SHAPE = ModelShape(num_layers=2, hidden_size=64, intermediate_size=128, vocab_size=384, itemsize=4)
SIZING = Sizing(16, 32, SHAPE.estimate(32))
HUGE = 1e12


def needed(rows: int, longest: int) -> float:
    return SHAPE.estimate(32).per_token * rows * (longest + 32)


def test_the_longest_come_first_and_equal_ones_as_they_stand() -> None:
    assert longest_first([3, 9, 3, 7]) == [1, 3, 0, 2]
    assert longest_first([3, 9, 3, 7], answered=[3, 0]) == [1, 2]


def test_far_from_the_limit_the_size_does_not_depend_on_it() -> None:
    """Else a neighbour's memory would decide the bits of an answer."""
    near = needed(16, 500)
    assert {SIZING.rows_that_fit(500, room) for room in (2.01 * near, 3 * near, HUGE)} == {16}
    assert SIZING.rows_that_fit(500, 1.5 * near) == 16
    assert SIZING.rows_that_fit(500, 0.5 * near) == 8


def test_one_row_is_always_tried() -> None:
    assert SIZING.rows_that_fit(500, 10.0) == 1
    assert SIZING.rows_that_fit(500, -1e9) == 1


def test_what_was_measured_counts_more_than_the_formula_and_grows_in_bounds() -> None:
    room = 0.5 * needed(16, 500)
    generous = SIZING.measured(4, 500, round(0.1 * needed(4, 500)))
    assert generous.rows_that_fit(500, room) == 8  # twice what was measured, though ten times would fit
    assert SIZING.measured(4, 500, round(2 * needed(4, 500))).rows_that_fit(500, room) == 3


def test_two_sizes_make_a_line() -> None:
    line = SIZING.measured(2, 100, 1_000_000).measured(4, 100, 1_500_000)
    assert line.rows_that_fit(100, 2_000_000) == 6


def test_what_failed_is_never_composed_again() -> None:
    failed = SIZING.failed(16, 100)
    assert failed.rows_that_fit(100, HUGE) == 8
    assert failed.failed(8, 100).rows_that_fit(100, HUGE) == 4
    assert failed.failed(2, 100).rows_that_fit(40, HUGE) == 1


def test_a_batch_stays_as_it_was_written_down_until_it_is_answered_or_given_up() -> None:
    lines = [Composed(batch=0, rows=(4, 1), longest=9), Composed(batch=1, rows=(0, 2, 3), longest=5)]
    begun = recorded(lines, [0])
    assert (begun.pending, begun.next_number, begun.rows) == (lines[1], 2, {4, 1})
    gone = recorded([*lines, DidNotFit(batch=1, why="no room")], [0])
    assert (gone.pending, gone.failed, gone.next_number, gone.rows) == (None, (lines[1],), 2, {4, 1})
    assert recorded(lines, [0, 1]).pending is None
    assert recorded([], []).next_number == 0


def test_what_changed_is_named() -> None:
    assert changes({"seed": "0", "model": "a" * 64}, {"seed": "1", "model": "a" * 64}) == ("seed: 0 before, 1 now",)
    assert changes({"model": "a" * 64}, {"model": "b" * 64}) == (f"model: {'a' * 16}... before, {'b' * 16}... now",)
    assert changes({"seed": "0"}, {"seed": "0"}) == ()


def test_draws_are_uniform_and_know_seed_row_and_position() -> None:
    found = [draw(1, row, position) for row in range(40) for position in range(50)]
    assert len(set(found)) == len(found)
    assert all(0 <= number < 1 for number in found)
    assert abs(sum(found) / len(found) - 0.5) < 0.03
    others: list[Callable[[], float]] = [lambda: draw(2, 3, 4), lambda: draw(1, 4, 4), lambda: draw(1, 3, 5)]
    assert draw(1, 3, 4) == draw(1, 3, 4)
    assert all(other() != draw(1, 3, 4) for other in others)


@pytest.mark.parametrize("rows", [1, 7])
def test_an_estimate_grows_with_rows_and_length(rows: int) -> None:
    assert needed(rows, 10) < needed(rows, 11) < needed(rows + 1, 11)
