"""The goodput ledger: every second in exactly one bucket, by construction."""

import random

import pytest

from mem_core.core.run.goodput import GoodputLedger, split_productive
from mem_core.domain.errors import InternalError
from mem_core.domain.run import GOODPUT_BUCKETS


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_nested_buckets_count_the_innermost_and_sum_to_the_wall_time() -> None:
    clock = Clock()
    ledger = GoodputLedger(clock)
    clock.now_s += 2
    with ledger.bucket("productive"):
        clock.now_s += 5
        with ledger.bucket("save_stall"):
            clock.now_s += 1
        clock.now_s += 3
    clock.now_s += 4
    assert ledger.drain().seconds == {"start": 6, "productive": 8, "save_stall": 1}


def test_an_exception_leaves_the_bucket() -> None:
    clock = Clock()
    ledger = GoodputLedger(clock)

    def restore_badly() -> None:
        with ledger.bucket("restore"):
            clock.now_s += 1
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        restore_badly()
    assert ledger.current == "start"
    clock.now_s += 1
    assert ledger.drain().seconds == {"restore": 1, "start": 1}


def test_draining_at_any_moment_loses_nothing() -> None:
    clock, rng, total_s = Clock(), random.Random(3), 0.0
    ledger = GoodputLedger(clock)
    began_s = clock.now_s
    for _ in range(2_000):
        clock.now_s += rng.random()
        if rng.random() < 0.3:
            total_s += sum(ledger.drain().seconds.values())
        else:
            ledger.enter(rng.choice(GOODPUT_BUCKETS))
    total_s += sum(ledger.drain().seconds.values())
    assert total_s == pytest.approx(clock.now_s - began_s)
    assert ledger.drain().seconds == {}


def test_moving_takes_no_more_than_there_is() -> None:
    clock = Clock()
    ledger = GoodputLedger(clock, bucket="productive")
    clock.now_s += 10
    assert ledger.move("productive", "redone", 4) == 4
    assert ledger.move("productive", "redone", 100) == 6
    assert ledger.move("productive", "redone", -1) == 0
    assert ledger.drain().seconds == {"redone": 10}


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    clock = Clock()
    ledger = GoodputLedger(clock)
    clock.now_s += 5
    ledger.enter("idle")
    clock.now_s -= 50
    assert ledger.drain().seconds == {"start": 5}


def test_an_unknown_bucket_is_refused_by_name() -> None:
    ledger = GoodputLedger(Clock())
    with pytest.raises(InternalError, match="cofee"):
        ledger.enter("cofee")
    assert ledger.current == "start"


@pytest.mark.parametrize(
    ("from_step", "to_step", "highest_step", "expected"),
    [(100, 200, 100, (10, 0)), (100, 200, 150, (5, 5)), (100, 200, 900, (0, 10)), (100, 200, 0, (10, 0)), (100, 100, 100, (0, 10))],
)
def test_steps_up_to_the_highest_ever_done_were_redone(
    from_step: int, to_step: int, highest_step: int, expected: tuple[float, float]
) -> None:
    assert split_productive(from_step, to_step, highest_step, 10.0) == expected
