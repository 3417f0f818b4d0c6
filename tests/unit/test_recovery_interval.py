"""Segment length from save cost and fault rate: pure, against a brute search of the model it minimises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mem_core.core.recovery_interval import best_interval_s, best_segment_steps, expected_goodput


@given(save=st.floats(0.001, 0.5), faults=st.floats(60.0, 100_000.0))
def test_the_interval_is_within_a_hair_of_the_best_goodput(save: float, faults: float) -> None:
    """No interval on a fine grid does better by more than two thousandths."""
    best = max(expected_goodput(save * 1.1**power, save, faults, 1.0) for power in range(-40, 140))
    assert expected_goodput(best_interval_s(save, faults), save, faults, 1.0) > best - 0.002


def test_known_values() -> None:
    """A save of 20 ms and a fault every 120 s: about two seconds of work per segment."""
    assert best_interval_s(0.02, 120.0) == pytest.approx(2.18, abs=0.02)
    assert best_segment_steps(0.0125, 0.02, 120.0, 1_000_000) == pytest.approx(174, abs=3)


def test_bounds() -> None:
    """Never no step, never more than the run, and a save that costs more than faults are apart is not divided by."""
    assert best_segment_steps(100.0, 0.001, 60.0, 50) == 1
    assert best_segment_steps(0.001, 5.0, 1e6, 50) == 50
    assert best_interval_s(1_000.0, 100.0) == 100.0


def test_goodput_of_the_target_case() -> None:
    """One fault every 120 s, a second to recover, 20 ms to save: above 0.95, with room."""
    assert expected_goodput(best_interval_s(0.02, 120.0), 0.02, 120.0, 1.0) > 0.97
