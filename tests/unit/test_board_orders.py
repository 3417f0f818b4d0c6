"""An order to stop ends the segment at the same step on every rank, whenever it comes and whichever rank is ahead."""

import itertools
from pathlib import Path

import pytest

from mem_core.runtime.ranks.local.board import Board

STEPS = 6


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """The supervisor's side of a fresh page."""
    return Board.create(tmp_path / "board")


def test_without_an_order_every_batch_may_start(board: Board) -> None:
    assert all(board.may_start(batch, rank) for batch in range(100) for rank in (0, 1))


def test_the_order_stands_on_the_shared_page_for_who_opens_it(board: Board, tmp_path: Path) -> None:
    rank = Board(tmp_path / "board")
    board.order_stop()
    assert rank.may_start(7, 0)
    assert not rank.may_start(8, 0)


def test_every_interleaving_of_two_ranks_and_an_order_stops_both_at_the_same_batch(board: Board) -> None:
    """A rank may ask for batch b + 1 only after both have begun batch b, whose collective they share; all else is free."""
    for order_at, first_ranks in itertools.product(range(2 * STEPS), itertools.product((0, 1), repeat=STEPS)):
        board.clear()
        stopped: dict[int, int] = {}
        asked = 0
        for batch, first in enumerate(first_ranks):
            for rank in (first, 1 - first):
                if asked == order_at:
                    board.order_stop()
                asked += 1
                if rank not in stopped and not board.may_start(batch, rank):
                    stopped[rank] = batch
            if stopped:
                break
        assert len(stopped) in (0, 2), f"one rank waits for the other for ever: {order_at} {first_ranks}"
        assert len(set(stopped.values())) <= 1
        assert stopped or order_at >= 2 * STEPS - 4, "an order in time was not obeyed"


def test_a_wish_of_rank_0_is_an_order_too_and_that_of_another_rank_is_not(board: Board) -> None:
    assert board.may_start(3, 1, stop_wanted=True)
    assert board.may_start(4, 1)
    assert board.may_start(4, 0, stop_wanted=True)
    assert not board.may_start(5, 0)
    assert not board.may_start(5, 1)


def test_clear_takes_order_and_limit_back(board: Board) -> None:
    board.order_stop()
    board.may_start(0, 0)
    board.clear()
    assert board.may_start(1, 0)
    assert board.may_start(2, 1)
