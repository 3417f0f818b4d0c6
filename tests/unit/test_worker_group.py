"""Ranks of this machine: what is theirs alone beside the contract of `Ranks`, with real processes and tiny ranks instead of DeepSpeed."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.segment import WorkerLost
from mem_core.infrastructure.machine.process_facts import start_ticks
from mem_core.runtime.ranks.local.group import WorkerGroup
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.ranks.local.ranks import LocalRanks
from mem_core.runtime.ranks.port import Purpose, Watch
from mem_core.testing.contracts.ranks_contract import failure_of, scripted_spec

START = TrainingPosition(applied_steps=0, batch_index=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server with nothing heavy imported."""
    server = ForkServer.start(dict(os.environ), tmp_path_factory.mktemp("logs"), preload=("mem_core.testing.scripted_rank",))
    yield server
    server.close()


@pytest.fixture
def group_of(server: ForkServer, tmp_path: Path) -> Iterator[Callable[[str], WorkerGroup]]:
    """Make groups of scripted ranks; all are ended afterwards."""
    groups: list[WorkerGroup] = []

    def make(entry: str) -> WorkerGroup:
        groups.append(new_group(server, tmp_path / "live", entry))
        return groups[-1]

    yield make
    for group in groups:
        group.stop()


def new_group(server: ForkServer, live: Path, entry: str, num_ranks: int = 1) -> WorkerGroup:
    return LocalRanks(server, live, f"mem_core.testing.scripted_rank:{entry}").start(scripted_spec(num_ranks), Watch())


def gone(pids: list[int], limit_s: float = 5.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if all(start_ticks(pid) is None for pid in pids):
            return True
        time.sleep(0.01)
    return False


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(group_of: Callable[[str], WorkerGroup]) -> None:
    """TERM, grace, KILL."""
    group = group_of("stubborn")
    end = time.monotonic() + 5.0
    while not group.pids and time.monotonic() < end:
        time.sleep(0.01)
        group._children[0].exit_code()
    pids = group.pids
    time.sleep(0.3)
    group.stop()
    assert pids
    assert gone(pids)


def test_thirty_groups_leave_no_descriptor_and_no_thread_behind(server: ForkServer, tmp_path: Path) -> None:
    """Each try takes pipes, sockets, maps and a thread; all are given back."""

    def one() -> None:
        group = new_group(server, tmp_path, "obedient")
        group.restore(None, START)
        group.stop()

    one()
    gc.collect()
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for _ in range(30):
        one()
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before


def test_a_fork_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    """Its children die with it, and the next group stands on a new one; closing ends that one too."""
    server = ForkServer.start(dict(os.environ), tmp_path / "logs", preload=())
    try:
        group = new_group(server, tmp_path / "live", "obedient", 2)
        group.restore(None, START)
        pids, first = group.pids, server.pid
        os.kill(first, signal.SIGKILL)
        assert gone([*pids, first])
        failure = failure_of(group)
        assert isinstance(failure, WorkerLost)
        replacement = new_group(server, tmp_path / "live", "obedient", 2)
        assert replacement.restore(None, START).applied_steps == 0
        assert server.pid != first
        pids = replacement.pids
    finally:
        server.close()
    assert gone([*pids, server.pid])


def test_a_server_started_from_a_short_lived_thread_outlives_it(tmp_path: Path) -> None:
    """The parent-death signal is tied to a thread: it must not be the one that happened to ask."""
    servers: list[ForkServer] = []
    thread = threading.Thread(target=lambda: servers.append(ForkServer.start(dict(os.environ), tmp_path / "logs", preload=())))
    thread.start()
    thread.join()
    time.sleep(1.0)
    try:
        assert servers[0].alive()
    finally:
        servers[0].close()


def test_the_folder_of_a_killed_flow_is_removed(group_of: Callable[[str], WorkerGroup], tmp_path: Path) -> None:
    """A flow that was killed left its corner of the live folder; the next group removes it and keeps those of the living."""
    dead, living = tmp_path / "live" / "999999999", tmp_path / "live" / str(os.getppid())
    dead.mkdir(parents=True)
    living.mkdir()
    group_of("obedient").stop()
    assert not dead.exists()
    assert living.exists()


def test_the_files_of_a_try_lie_where_others_look_for_them(server: ForkServer, tmp_path: Path) -> None:
    """`live/PID/try-N/rank-N.heartbeat` is what a drill reads from outside; tries are counted for each purpose."""
    live, logs = tmp_path / "live", tmp_path / "logs"
    server.log_into(logs)
    ranks = LocalRanks(server, live, "mem_core.testing.scripted_rank:obedient")
    purposes: tuple[Purpose, ...] = ("train", "train", "replay", "reshard")
    groups = [ranks.start(scripted_spec(2), Watch(purpose=purpose)) for purpose in purposes]
    for group in groups:
        group.restore(None, START)
    pid = os.getpid()
    tries = [f"{pid}/try-0001", f"{pid}/try-0002", f"{pid}-replay/try-0001", f"{pid}-reshard/try-0001"]
    found = sorted(str(path.relative_to(live)) for path in live.glob("*/*/*"))
    assert found == sorted(f"{name}/{file}" for name in tries for file in ("board", "rank-0.heartbeat", "rank-1.heartbeat"))
    assert sorted(path.name for path in logs.iterdir()) == ["rank-0.log", "rank-1.log"]
    for group in groups:
        group.stop()
    assert not live.exists()


def test_groups_that_start_and_end_side_by_side_leave_each_other_their_folders(server: ForkServer, tmp_path: Path) -> None:
    """Training, replay and evaluation share `live`: who ends takes the empty folder away while another is just coming."""
    ranks, live = LocalRanks(server, tmp_path / "live", "mem_core.testing.scripted_rank:obedient"), tmp_path / "live"
    stop = threading.Event()

    def take_away() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                live.rmdir()
            time.sleep(0.0001)

    thief = threading.Thread(target=take_away)
    thief.start()
    try:
        for _ in range(25):
            ranks.start(scripted_spec(1), Watch(purpose="replay")).stop()
    finally:
        stop.set()
        thief.join()
    assert not live.exists()
