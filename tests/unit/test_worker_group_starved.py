"""A process that gets no core is at work; one that sleeps or is stopped is not. Real processes on one core."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from mem_core.infrastructure.machine.process_facts import active_seconds, cpu_seconds

LOOKS = 4
SPIN, SLEEP = "while True: pass", "import time; time.sleep(60)"


@pytest.fixture
def start() -> Iterator[Callable[[str, int], int]]:
    """Programs on the first core, with a niceness; ended afterwards."""
    running: list[subprocess.Popen[bytes]] = []
    core = min(os.sched_getaffinity(0))

    def begin(program: str, niceness: int = 0) -> int:
        prefix = f"import os; os.sched_setaffinity(0, {{{core}}}); os.nice({niceness})\n"
        running.append(subprocess.Popen([sys.executable, "-c", prefix + program]))
        return running[-1].pid

    yield begin
    for process in running:
        process.kill()
        process.wait()


def activity(pid: int, seconds: float = 1.0) -> tuple[float, float]:
    """(active, CPU) seconds per second of wall time."""
    before, cpu_before, started_s = active_seconds(pid), cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    wall_s = time.monotonic() - started_s
    return (active_seconds(pid) - before) / wall_s, (cpu_seconds(pid) - cpu_before) / wall_s


def test_a_starved_process_is_active_although_it_hardly_computes(start: Callable[..., int]) -> None:
    """Three spinners at full weight keep a core from one at the lowest."""
    for _ in range(3):
        start(SPIN)
    starved = start(SPIN, 19)
    time.sleep(1.0)
    # The kernel books a wait for a core when it is over: on a busy machine that takes more than one look.
    looks = [activity(starved) for _ in range(LOOKS)]
    active, computed = (sum(values) / LOOKS for values in zip(*looks, strict=True))
    assert active > 0.5
    assert computed < 0.4


def test_a_sleeping_and_a_stopped_process_are_not_active(start: Callable[..., int]) -> None:
    """Whatever else happens on their core."""
    start(SPIN)
    sleeping, stopped = start(SLEEP), start(SPIN)
    time.sleep(1.0)
    os.kill(stopped, signal.SIGSTOP)
    assert activity(sleeping)[0] < 0.02
    assert activity(stopped)[0] < 0.02


def test_a_process_that_is_gone_was_active_for_nothing() -> None:
    """No error, no time."""
    assert active_seconds(None) == 0.0
    assert active_seconds(2**22 + 1) == 0.0
