"""Loss spikes and stragglers: pure, robust against the odd value."""

import random

from mem_core.core.recovery.spikes import MIN_HISTORY, spike_at
from mem_core.core.recovery.stragglers import WINDOW, StragglerWatch, slow_rank


def noisy(count: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [2.0 + 0.05 * rng.gauss(0, 1) for _ in range(count)]


def test_a_spike_is_found_where_it_is() -> None:
    """The first one counts."""
    losses = [*noisy(30, 1), 9.0, 9.0, *noisy(5, 2)]
    assert spike_at(noisy(50), losses, 20.0) == 30


def test_noise_and_decline_are_no_spike() -> None:
    """10,000 noisy losses, and a curve that falls as a young model's does."""
    assert spike_at(noisy(100), noisy(10_000, 3), 20.0) is None
    assert spike_at([], [6.0 * 0.99**step for step in range(500)], 20.0) is None


def test_earlier_spikes_do_not_hide_a_later_one() -> None:
    """A tenth of the past is far out; the threshold hardly moves."""
    history = [loss if index % 10 else 9.0 for index, loss in enumerate(noisy(200))]
    assert spike_at(history, [9.0], 20.0) == 0


def test_a_flat_curve_makes_no_spike_of_rounding() -> None:
    """All losses equal: one per cent more is nothing."""
    assert spike_at([2.0] * 50, [2.02], 5.0) is None


def test_a_short_past_judges_nothing() -> None:
    """The first steps of a run may jump."""
    assert spike_at(noisy(MIN_HISTORY - 1), [50.0], 5.0) is None


def test_the_slow_rank_is_named_once_until_it_has_caught_up() -> None:
    """One notice, not one per step; another after it was well in between."""
    watch = StragglerWatch(3)
    named = [watch.take([0.010, 0.010, 0.030]) for _ in range(2 * WINDOW)]
    assert [found for found in named if found] == [(2, 3.0)]
    assert not any(watch.take([0.010, 0.010, 0.010]) for _ in range(2 * WINDOW))
    again = [watch.take([0.010, 0.010, 0.030]) for _ in range(2 * WINDOW)]
    assert len([found for found in again if found]) == 1


def test_single_slow_steps_and_equal_ranks_are_no_straggler() -> None:
    """Medians over a window, and a margin that a busy machine does not reach."""
    watch = StragglerWatch(2)
    rng = random.Random(4)
    steps = [[0.01 * rng.uniform(0.9, 1.1), 0.5 if step % 10 == 0 else 0.01] for step in range(1_000)]
    assert not any(watch.take(step) for step in steps)


def test_one_rank_has_no_peers() -> None:
    """Nothing to compare with."""
    assert slow_rank([[1.0]]) is None
