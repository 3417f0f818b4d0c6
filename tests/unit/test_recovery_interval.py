"""Segment length from save cost and fault rate: pure, against a brute search of the model it minimises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mem_core.core.recovery.interval import (
    FIRST_INTERVAL_S,
    PRIOR_FAULT_FREE_S,
    RunPace,
    best_interval_s,
    expected_goodput,
)
from mem_core.domain.events import AttemptStarted, FaultMet, RunEnded, SegmentEnded, SegmentStarted, TimeSpent
from mem_core.domain.request import MAX_SEGMENTS
from mem_core.domain.segment import SegmentCompleted


@given(save=st.floats(0.001, 0.5), faults=st.floats(60.0, 100_000.0))
def test_the_interval_is_within_a_hair_of_the_best_goodput(save: float, faults: float) -> None:
    """No interval on a fine grid does better by more than two thousandths."""
    best = max(expected_goodput(save * 1.1**power, save, faults, 1.0) for power in range(-40, 140))
    assert expected_goodput(best_interval_s(save, faults), save, faults, 1.0) > best - 0.002


def test_known_values() -> None:
    """A save of 20 ms and a fault every 120 s: about two seconds of work per segment."""
    assert best_interval_s(0.02, 120.0) == pytest.approx(2.18, abs=0.02)


def test_bounds() -> None:
    """A save that costs more than faults are apart is not divided by."""
    assert best_interval_s(1_000.0, 100.0) == 100.0


def test_goodput_of_the_target_case() -> None:
    """One fault every 120 s, a second to recover, 20 ms to save: above 0.95, with room."""
    assert expected_goodput(best_interval_s(0.02, 120.0), 0.02, 120.0, 1.0) > 0.97


def paced(segments: int, *, step_s: float = 0.01, cost_s: float = 0.05, faults: int = 0, steps: int = 100) -> RunPace:
    """A run of equal segments, each ended with a cost, with some faults at the end."""
    pace = RunPace()
    pace.add(AttemptStarted(attempt=1, pid=1, host="h"))
    for index in range(segments):
        start = index * steps
        pace.add(SegmentStarted(segment_index=index, from_step=start, until_step=start + steps, try_number=1))
        outcome = SegmentCompleted(
            from_step=start, to_step=start + steps, batch_index=start + steps, loss_first=1.0, loss_last=1.0, tokens=1,
            duration_s=steps * step_s, trajectory_digest="",
        )  # fmt: skip
        pace.add(SegmentEnded(segment_index=index, outcome=outcome))
        pace.add(TimeSpent(seconds={"productive": steps * step_s, "save_stall": cost_s / 2, "idle": cost_s / 2}))
    for _ in range(faults):
        pace.add(FaultMet(kind="worker_lost", step=0, detail=""))
    return pace


def test_without_a_wish_steps_alone_decide() -> None:
    """No time bound unless the request has one."""
    assert paced(5).interval_s(None, 1_000) is None


def test_nothing_measured_yet_risks_a_minute() -> None:
    """The first segment of a slow model is bounded too; a fixed wish is taken as it is."""
    assert RunPace().interval_s("auto", 1_000) == FIRST_INTERVAL_S
    assert RunPace().interval_s(7.0, 1_000) == 7.0


def test_auto_follows_the_measured_cost_and_the_fault_rate() -> None:
    """100 segments of 1.05 s and 4 faults: the formula's value for what was measured; more faults, shorter; dearer saves, longer."""
    pace = paced(100, faults=4)
    mean_s = (100 * 1.05 + PRIOR_FAULT_FREE_S) / 5
    assert pace.mean_time_between_faults_s == pytest.approx(mean_s)
    chosen = pace.interval_s("auto", 1_000)
    assert chosen == pytest.approx(best_interval_s(0.05, mean_s))
    assert paced(100, faults=20).interval_s("auto", 1_000) == pytest.approx(best_interval_s(0.05, (105 + PRIOR_FAULT_FREE_S) / 21))
    assert paced(100, cost_s=1.0).interval_s("auto", 1_000) == pytest.approx(best_interval_s(1.0, 200 + PRIOR_FAULT_FREE_S))


def test_a_killed_attempt_is_a_fault_and_a_stopped_one_is_not() -> None:
    """An attempt that begins while the one before it never ended counts its death."""
    pace = paced(1)
    pace.add(AttemptStarted(attempt=2, pid=2, host="h"))
    assert pace.faults == 1
    pace.add(RunEnded(status="interrupted", exit_code=75, message=""))
    pace.add(AttemptStarted(attempt=3, pid=3, host="h"))
    assert pace.faults == 1


@pytest.mark.parametrize("wish", ["auto", 1.0])
def test_the_number_of_segments_stays_bounded(wish: float) -> None:
    """A run that would need more segments than it may have gets longer ones; none left means that steps alone decide."""
    pace = paced(900)
    assert pace.interval_s(wish, 1_000_000) == pytest.approx(1_000_000 * 0.01 / 100)
    assert paced(MAX_SEGMENTS).interval_s(wish, 1_000) is None
