"""Ranks agree through one shared page: no vote is lost, no plan is read half, nobody waits for ever."""

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.plan import MemoryPlan
from mem_core.runtime.ranks.local.board import Board
from mem_core.runtime.ranks.local.memory_board import MemoryBoard, RankReading


@pytest.fixture
def page(tmp_path: Path) -> mmap.mmap:
    """The page of a fresh try."""
    return Board.create(tmp_path / "board").page


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Run at the same time, each in a thread; the results in order."""
    results: list[Any] = [None] * len(functions)

    def call(index: int) -> None:
        results[index] = functions[index]()

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_every_rank_sees_the_worst_failure_of_each_round(page: mmap.mmap) -> None:
    """Hundreds of rounds with failures now here, now there: all ranks come to the same answer in each."""
    ranks, rounds = 3, 300

    def failure(rank: int, turn: int) -> MicroBatch | None:
        return MicroBatch(rank + 1, 64 + turn) if (turn + rank) % 5 == 0 else None

    def run(rank: int) -> list[MicroBatch | None]:
        board = MemoryBoard(page, rank, ranks)
        return [board.agree(failure(rank, turn), 20) for turn in range(rounds)]

    expected = []
    for turn in range(rounds):
        failed = [size for rank in range(ranks) if (size := failure(rank, turn)) is not None]
        expected.append(max(failed, key=lambda size: size.tokens) if failed else None)
    assert in_threads([lambda rank=rank: run(rank) for rank in range(ranks)]) == [expected] * ranks


def test_a_rank_that_never_speaks_is_a_timeout(page: mmap.mmap) -> None:
    """The wait is bounded, also where nobody watches."""
    with pytest.raises(TimeoutError):
        MemoryBoard(page, 0, 2).agree(None, 0.05)


def test_a_plan_is_followed_from_its_batch_on(page: mmap.mmap) -> None:
    """Announced for batch 8: unknown at 7, the same plan at 8 and later; withdrawn it is gone; the rest of the page is untouched."""
    first, other = MemoryBoard(page, 0, 2), MemoryBoard(page, 1, 2)
    plan = MemoryPlan(micro_batch_rows=3, micro_batch_tokens=700, activation_checkpointing=True, offload_optimizer="cpu")
    assert other.announced(8) is None
    first.post_reading(RankReading(1, 2, 3))
    other.post_reading(RankReading(4, 5, 6, 7, 8))
    first.announce(8, plan)
    assert [other.announced(index) for index in (7, 8, 9)] == [None, (8, plan), (8, plan)]
    first.withdraw()
    assert other.announced(9) is None
    assert first.readings() == [RankReading(1, 2, 3), RankReading(4, 5, 6, 7, 8)]


def test_batch_zero_can_be_announced(page: mmap.mmap) -> None:
    """An empty slot and a plan for the very first batch are told apart."""
    board = MemoryBoard(page, 0, 2)
    board.announce(0, MemoryPlan(micro_batch_rows=1))
    assert board.announced(0) == (0, MemoryPlan(micro_batch_rows=1))
