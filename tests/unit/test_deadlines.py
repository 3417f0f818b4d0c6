"""When silence is a hang: pure, every branch."""

import pytest

from mem_core.core.recovery.deadlines import BUSY_ALLOWANCE, MINIMUM_S, PhaseTimes, RankSign, find_hung, is_hung, silence_allowed_s


def sign(rank: int = 0, silent: float = 4.0, allowed: float = 3.0, cpu: float = 0.0, stopped: bool = False) -> RankSign:
    return RankSign(rank, silent, allowed, cpu, stopped)


def test_deadlines_are_learned_and_never_below_the_minimum() -> None:
    """Observed × factor where that is more than what a busy machine can cause."""
    times = PhaseTimes()
    assert times.allowed_s("step", 5.0) == MINIMUM_S["step"]
    times.observe("step", 2.0)
    times.observe("step", 0.1)
    assert times.allowed_s("step", 5.0) == 10.0
    assert times.allowed_s("save", 5.0) == MINIMUM_S["save"]
    assert silence_allowed_s("step", 0.5, 5.0) == 3.0


def test_nobody_overdue_is_nobody_hung() -> None:
    """Silence below the deadline means nothing, whatever else is seen."""
    assert find_hung(()) is None
    assert find_hung((sign(silent=2.9), sign(1, silent=1.0, stopped=True))) is None


def test_a_stopped_rank_is_named_although_its_peer_has_been_silent_longer_and_another_computes() -> None:
    """The kernel's word beats every guess."""
    signs = (sign(0, silent=9.0, cpu=5.0), sign(1, silent=4.0, stopped=True), sign(2, silent=9.0))
    found = find_hung(signs)
    assert found is not None
    assert found.rank == 1


def test_peers_of_a_computing_rank_are_not_hung() -> None:
    """Rank 0 waits in a collective for rank 1, which computes on a starved machine: ten times the deadline for both."""
    assert find_hung((sign(0, silent=20.0), sign(1, silent=20.0, cpu=10.0))) is None
    limit = 3.0 * BUSY_ALLOWANCE
    found = find_hung((sign(0, silent=limit), sign(1, silent=limit - 1, cpu=10.0)))
    assert found is not None


def test_a_dead_lock_is_found_at_the_deadline_and_names_the_most_overdue() -> None:
    """No rank uses CPU time: there is nothing to wait for."""
    found = find_hung((sign(0, silent=3.1), sign(1, silent=3.3)))
    assert found is not None
    assert found.rank == 1


@pytest.mark.parametrize(("silent", "cpu", "hung"), [(2.9, 0.0, False), (3.0, 0.0, True), (3.0, 0.1, False), (30.0, 20.0, True)])
def test_a_rank_alone(silent: float, cpu: float, hung: bool) -> None:
    """A starved rank that gets a fiftieth of a core is slow; ten deadlines later it is hung all the same."""
    assert is_hung(silent, 3.0, cpu) is hung


def test_a_rank_that_stands_in_a_run_queue_is_at_work() -> None:
    """Under a real-time neighbour a process may get no core at all for seconds: that is no hang."""
    starved = RankSign(0, 4.0, 3.0, 0.0, runnable=True)
    assert find_hung((starved,)) is None
    assert find_hung((RankSign(0, 4.0, 3.0, 0.0, stopped=True, runnable=True),)) is not None
