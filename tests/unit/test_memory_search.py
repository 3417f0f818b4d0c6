"""The search for the largest size that fits: between what worked and what failed, in few failures, close to the best."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mem_core.core.memory.control import MemoryControl, Watermarks
from mem_core.core.memory.diagnosis import StepReading
from mem_core.core.memory.ladder import MicroBatch, PlanBounds, held_before, largest_micro_batch, shrink_plan
from mem_core.core.memory.model import PeakLine
from mem_core.domain.plan import MemoryPlan, MemoryPlanChange, plan_at, record_change

GIB = 2**30


class Machine:
    """Steps of rows of one length as a rank does them: `fits` says which sizes do, `peak` what is read after a step, in parts."""

    def __init__(self, rows: int, length: int, line: PeakLine | None = None) -> None:
        self.first = MemoryPlan(micro_batch_rows=rows)
        self.bounds = PlanBounds(most_rows=rows, longest_tokens=length, may_checkpoint=False)
        self.control = MemoryControl(Watermarks(0.9, 0.7), self.bounds, self.first, line)
        self.changes: tuple[MemoryPlanChange, ...] = ()
        self.failures: list[int] = []
        self.rows: list[int] = []

    def _record(self, batch: int, plan: MemoryPlan, failed_tokens: int = 0) -> None:
        change = MemoryPlanChange(batch_index=batch, plan=plan, reason="test", failed_tokens=failed_tokens, limit_bytes=GIB)
        self.changes = record_change(self.changes, change)
        self.control.changed(plan, failed_tokens=failed_tokens, limit_bytes=GIB)

    def run(self, steps: int, most_rows: int, peak: tuple[float, float] = (0.1, 0.0)) -> None:
        """`peak`: the fixed part of the limit, and the part of it that a row takes."""
        for batch in range(steps):
            while (rows := largest_micro_batch(plan := plan_at(self.changes, batch, self.first), self.bounds).rows) > most_rows:
                failed = MicroBatch(rows, self.bounds.longest_tokens)
                smaller = shrink_plan(plan, self.bounds, failed, held_before(self.changes, batch))
                assert smaller is not None
                self.failures.append(rows)
                self._record(batch, smaller, failed.tokens)
            self.rows.append(rows)
            size, fixed = MicroBatch(rows, self.bounds.longest_tokens), int(peak[0] * GIB)
            reading = StepReading(batch, size, fixed, int((peak[0] + peak[1] * rows) * GIB), GIB, "limit")
            decision = self.control.decide(reading)
            if decision is not None and decision.plan is not None:
                self._record(batch + 1, decision.plan)


@given(rows=st.integers(2, 512), part=st.floats(0.001, 1.0), length=st.sampled_from([16, 48, 128, 4_096]))
def test_any_limit_is_found_in_few_failures(rows: int, part: float, length: int) -> None:
    """Nothing but failures to go by: at most log2 of them, and the end is within 5 % of the best."""
    most = max(1, int(rows * part))
    machine = Machine(rows, length)
    machine.run(1_200, most)
    assert len(machine.failures) <= math.ceil(math.log2(rows))
    assert machine.rows[-1] >= 0.95 * most
    assert len(set(machine.failures)) == len(machine.failures), "no size is tried twice"


def test_six_of_twenty_four_rows_fit() -> None:
    """24, 12, then 9 and 7 between what worked and what failed; 6 from then on, and no batch below it."""
    machine = Machine(24, 128)
    machine.run(1_000, 6)
    assert machine.failures == [24, 12, 9, 7]
    assert set(machine.rows) == {6}


def test_a_hundred_of_128_rows_fit() -> None:
    """It does not stay at 64."""
    machine = Machine(128, 64)
    machine.run(1_000, 100)
    assert machine.rows[-1] in range(95, 101)
    assert len(machine.failures) <= 4


@pytest.mark.parametrize("fixed", [0.05, 0.3, 0.5])
def test_where_readings_tell_the_size_nothing_more_fails(fixed: float) -> None:
    """128 rows where 100 fill the limit: after the one failure the size just below the high watermark is taken, by prediction."""
    per_row = (1.0 - fixed) / 100
    machine = Machine(128, 64, PeakLine(0.0, per_row * GIB / 64))
    machine.run(1_000, 100, (fixed, per_row))
    assert machine.failures == [128]
    best = int((0.9 - fixed) / per_row)
    assert 0.94 * best <= machine.rows[-1] <= best


def test_what_held_before_a_growth() -> None:
    """Only a growth has something smaller before it that is known to work."""

    def change(batch: int, tokens: int) -> MemoryPlanChange:
        return MemoryPlanChange(batch_index=batch, plan=MemoryPlan(micro_batch_rows=8, micro_batch_tokens=tokens), reason="test")

    grown = (change(0, 400), change(50, 600))
    assert held_before(grown, 60) == grown[0].plan
    assert held_before(grown, 40) is None
    assert held_before((*grown, change(70, 400)), 80) is None
    assert held_before((change(0, 400), change(50, 0)), 60) == grown[0].plan
