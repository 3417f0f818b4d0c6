"""Supervision of rank processes: real processes and real signals, with tiny ranks instead of DeepSpeed."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.plan import Hyperparams, MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.segment import Hung, WorkerLost
from mem_core.infrastructure.machine.process_facts import start_ticks
from mem_core.runtime.ranks.local.group import WorkerGroup
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.ranks.local.ranks import LocalRanks
from mem_core.runtime.ranks.port import GroupFailed, Watch
from mem_core.runtime.ranks.worker.protocol import Train, WorkerSpec

START = TrainingPosition(applied_steps=0, batch_index=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server with nothing imported."""
    server = ForkServer.start(dict(os.environ), tmp_path_factory.mktemp("logs"), preload=())
    yield server
    server.close()


@pytest.fixture
def group_of(server: ForkServer, tmp_path: Path) -> Iterator[Callable[..., WorkerGroup]]:
    """Make groups of scripted ranks; all are ended afterwards."""
    groups: list[WorkerGroup] = []

    def make(entry: str, num_ranks: int = 1, segment_deadline_s: float | str = "auto") -> WorkerGroup:
        groups.append(new_group(server, tmp_path / "live", entry, num_ranks, segment_deadline_s))
        return groups[-1]

    yield make
    for group in groups:
        group.stop()


def new_group(server: ForkServer, live: Path, entry: str, num_ranks: int = 1, segment_deadline_s: float | str = "auto") -> WorkerGroup:
    sections = {"parallel": {"num_ranks": num_ranks}, "training": {"global_batch_size": 12}}
    request = RuntimeRequest.model_validate({"run_id": "x", "resilience": {"segment_deadline_s": segment_deadline_s}} | sections)
    spec = WorkerSpec(
        request=request, device="cpu", dtype="float32", num_threads=1, data_folder="", validation_folder=None, pad_token_id=0,
        default_plan=MemoryPlan(micro_batch_rows=8),
    )  # fmt: skip
    return LocalRanks(server, live, f"mem_core.testing.scripted_rank:{entry}").start(spec, Watch())


def train(group: WorkerGroup, until_step: int = 10, staging: str | None = None) -> int:
    done = group.train(Train(until_step, Hyperparams(), staging), lambda beats: None, lambda: False)
    return done.position.applied_steps


def failure_of(group: WorkerGroup) -> object:
    with pytest.raises(GroupFailed) as caught:
        train(group)
    return caught.value.failure


def gone(pids: list[int], limit_s: float = 5.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if all(start_ticks(pid) is None for pid in pids):
            return True
        time.sleep(0.01)
    return False


def test_commands_are_answered_by_every_rank_and_stop_leaves_nothing(group_of: Callable[..., WorkerGroup], tmp_path: Path) -> None:
    """Restore, train, evaluate, save; afterwards no process, no folder."""
    group = group_of("obedient", 3)
    assert group.restore(None, START).applied_steps == 0
    assert train(group, 5, "/nowhere") == 5
    assert group.evaluate(1) == 1.5
    assert [saved.weights_digest for saved in group.wait_saved(5, 5.0)] == ["d", "", ""]
    pids = group.pids
    group.stop()
    group.stop()
    assert gone(pids)
    assert not (tmp_path / "live").exists()


def test_the_first_rank_to_die_is_named_and_not_its_peers_complaint(group_of: Callable[..., WorkerGroup]) -> None:
    """Rank 0's "connection closed by peer" arrives first; the cause is rank 1's SIGKILL. Nobody is left."""
    group = group_of("dies_by_signal", 2)
    group.restore(None, START)
    pids = group.pids
    failure = failure_of(group)
    assert isinstance(failure, WorkerLost)
    assert (failure.evidence.rank, failure.evidence.signal, failure.evidence.batch_index) == (1, "SIGKILL", 7)
    assert gone(pids)


def test_exit_code_and_last_lines_are_evidence(group_of: Callable[..., WorkerGroup]) -> None:
    """A rank that exits by itself is lost with its exit code and its last words."""
    group = group_of("exits")
    group.restore(None, START)
    failure = failure_of(group)
    assert isinstance(failure, WorkerLost)
    assert failure.evidence.exit_code == 7
    assert "the last words of a rank" in failure.evidence.last_lines


def test_a_death_between_two_commands_is_found_by_the_next(group_of: Callable[..., WorkerGroup]) -> None:
    """A rank killed while idle fails the next command at once, by its signal."""
    group = group_of("obedient", 2)
    group.restore(None, START)
    os.kill(group.pids[1], signal.SIGKILL)
    assert gone(group.pids[1:])
    failure = failure_of(group)
    assert isinstance(failure, WorkerLost)
    assert (failure.evidence.rank, failure.evidence.signal) == (1, "SIGKILL")


def test_a_stopped_rank_is_named_with_the_stacks_of_all_and_ended(group_of: Callable[..., WorkerGroup]) -> None:
    """SIGSTOP of one of two: found after the 3 s that a step may be silent, both stacks taken, both processes gone."""
    group = group_of("stops_itself", 2)
    group.restore(None, START)
    pids = group.pids
    started_s = time.monotonic()
    failure = failure_of(group)
    assert isinstance(failure, Hung)
    assert failure.evidence.rank == 1
    assert failure.evidence.stacks.count("scripted_rank.py") >= 2
    assert 3.0 <= failure.waited_s < 10.0
    assert time.monotonic() - started_s < 20.0
    assert gone(pids)


def test_a_dead_lock_is_found(group_of: Callable[..., WorkerGroup]) -> None:
    """Nobody is stopped, nobody computes: hung after the same time."""
    group = group_of("waits_for_ever", 2)
    group.restore(None, START)
    failure = failure_of(group)
    assert isinstance(failure, Hung)
    assert failure.waited_s < 6.0


def test_a_rank_that_computes_is_slow_and_neither_it_nor_its_peer_is_hung(group_of: Callable[..., WorkerGroup]) -> None:
    """5 s without a word on a starved machine is no hang while one rank of the group uses CPU time."""
    group = group_of("computes_slowly", 2)
    group.restore(None, START)
    assert train(group, 11) == 11


def test_a_segment_past_its_own_deadline_is_hung_however_busy_it_looks(group_of: Callable[..., WorkerGroup]) -> None:
    """`resilience.segment_deadline_s` as a number: the same rank that is merely slow without it."""
    group = group_of("computes_slowly", 2, segment_deadline_s=1.0)
    group.restore(None, START)
    failure = failure_of(group)
    assert isinstance(failure, Hung)
    assert 1.0 <= failure.waited_s < 4.5, "it computes for 5 s"


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(group_of: Callable[..., WorkerGroup]) -> None:
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


def test_a_save_that_was_complete_before_the_death_is_kept(group_of: Callable[..., WorkerGroup]) -> None:
    """What a rank sent before it died still counts, also after the group was stopped."""
    group = group_of("saves_then_dies")
    group.restore(None, START)
    assert train(group, 4, "/nowhere") == 4
    assert [saved.step for saved in group.wait_saved(4, 5.0)] == [4]
    with pytest.raises(GroupFailed):
        train(group, 8)
    assert [saved.step for saved in group.wait_saved(4, 5.0)] == [4]


def test_waiting_for_a_save_of_a_stopped_group_fails_at_once(group_of: Callable[..., WorkerGroup]) -> None:
    """Neither an empty answer nor a wait until the deadline: the group is gone."""
    group = group_of("obedient", 2)
    group.restore(None, START)
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(group.wait_saved(99, 60.0))
        except GroupFailed as exc:
            outcome.append(exc.failure.kind)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    group.stop()
    thread.join(timeout=5)
    assert outcome == ["worker_lost"]
    with pytest.raises(GroupFailed):
        group.wait_saved(99, 60.0)


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


def test_the_folder_of_a_killed_flow_is_removed(group_of: Callable[..., WorkerGroup], tmp_path: Path) -> None:
    """A flow that was killed left its corner of the live folder; the next group removes it and keeps those of the living."""
    dead, living = tmp_path / "live" / "999999999", tmp_path / "live" / str(os.getppid())
    dead.mkdir(parents=True)
    living.mkdir()
    group_of("obedient").stop()
    assert not dead.exists()
    assert living.exists()
