"""Who may write a run: one living holder, a dead one replaced at once, a stopped one after its lease; the journal that it leaves."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mem_core.core.run.lease import Lease, LeaseFile, own_lease_path, read_lease
from mem_core.core.run.state_manager import StateManager, read_journal
from mem_core.domain.errors import RunHeld, StoreUnavailable
from mem_core.domain.events import GENESIS_SHA256, Noted
from mem_core.infrastructure.machine.process_facts import boot_id, pid_namespace, start_ticks
from mem_core.infrastructure.storage.presence import Patience
from mem_core.infrastructure.storage.whole_file import write_atomically

HOLDER = """
import sys, time
from pathlib import Path
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.errors import RunHeld
from mem_core.domain.events import Noted
state = StateManager.acquire(Path(sys.argv[1]), "run", lease_s=float(sys.argv[2]))
print("held", flush=True)
sys.stdin.readline()
try:
    state.fence()
    print("free to publish", flush=True)
except RunHeld as exc:
    print("fenced", flush=True)
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[object]:
    """Starts another process that holds the run."""
    started: list[subprocess.Popen[str]] = []

    def start(lease_s: float = 30.0) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), str(lease_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lease(**changes: object) -> Lease:
    """A lease of this very process until 100 s."""
    values: dict[str, object] = {
        "run_id": "run", "attempt": 1, "pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "boot_id": boot_id(),
        "host": os.uname().nodename, "since_unix_s": 0.0, "expires_unix_s": 100.0,
    }  # fmt: skip
    return Lease.model_validate(values | changes)


@pytest.mark.parametrize(
    ("changes", "now_s", "alive"),
    [
        ({}, 50.0, True),
        ({}, 101.0, False),
        ({"released": True}, 50.0, False),
        ({"start_ticks": 1}, 50.0, False),
        ({"pid": 2**22 + 1}, 50.0, False),
        ({"boot_id": "another boot"}, 50.0, True),
        ({"boot_id": "another boot"}, 101.0, False),
        ({"pid_namespace": pid_namespace(), "pid": 2**22 + 1}, 50.0, False),
        ({"pid_namespace": "pid:[1]", "pid": 2**22 + 1}, 50.0, True),
        ({"pid_namespace": "pid:[1]"}, 101.0, False),
        ({"host": "elsewhere", "pid": 2**22 + 1}, 50.0, True),
        ({"host": "elsewhere", "boot_id": "another"}, 101.0, False),
    ],
    ids=[
        "alive",
        "expired",
        "released",
        "pid reused",
        "no such pid",
        "the same name, another boot",
        "rebooted",
        "no such pid here",
        "another container",
        "another container, expired",
        "elsewhere",
        "elsewhere, expired",
    ],
)
def test_a_holder_lives_by_pid_and_start_time_where_pids_are_shared_and_by_the_clock_elsewhere(
    changes: dict[str, object], now_s: float, alive: bool
) -> None:
    assert lease(**changes).holder_alive(now_s) is alive


def test_a_living_holder_is_named_with_the_time_since_when(tmp_path: Path, hold) -> None:  # type: ignore[no-untyped-def]
    holder = hold()
    with pytest.raises(RunHeld, match=rf"process {holder.pid} on .* since \d{{4}}-\d\d-\d\d .*mem stop run") as caught:
        StateManager.acquire(tmp_path, "run")
    assert caught.value.exit_code == 76
    assert [path.name for path in (tmp_path / "run" / "journal").iterdir()] == ["attempt-0001.jsonl"]


def test_a_killed_holder_is_replaced_at_once_although_its_lease_runs(tmp_path: Path, hold) -> None:  # type: ignore[no-untyped-def]
    holder = hold(lease_s=3_600.0)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    state = StateManager.acquire(tmp_path, "run")
    assert state.attempt == 2
    state.release()


def test_a_zombie_holder_counts_as_dead(tmp_path: Path, hold) -> None:  # type: ignore[no-untyped-def]
    holder = hold(lease_s=3_600.0)
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has collected it
    state = StateManager.acquire(tmp_path, "run")
    assert state.attempt == 2
    state.release()


def test_a_stopped_holder_is_replaced_after_its_lease_and_is_fenced_when_it_wakes(tmp_path: Path, hold) -> None:  # type: ignore[no-untyped-def]
    holder = hold(lease_s=600.0)
    os.kill(holder.pid, signal.SIGSTOP)
    expires = read_lease(tmp_path / "run").expires_unix_s  # type: ignore[union-attr]
    with pytest.raises(RunHeld):
        StateManager.acquire(tmp_path, "run", clock=lambda: expires - 1)
    newer = StateManager.acquire(tmp_path, "run", clock=lambda: expires + 1)
    os.kill(holder.pid, signal.SIGCONT)
    answer, _ = holder.communicate("publish?\n", timeout=20)
    assert answer == "fenced\n"
    assert newer.fenced_by() is None
    newer.release()


def test_an_older_attempt_neither_publishes_nor_takes_the_lease_back(tmp_path: Path) -> None:
    older = StateManager.acquire(tmp_path, "run", clock=lambda: 0.0)  # its lease has run out long ago
    newer = StateManager.acquire(tmp_path, "run")
    with pytest.raises(RunHeld):
        older.fence()
    older.release()
    held = read_lease(tmp_path / "run")
    assert held is not None
    assert (held.attempt, held.released) == (2, False)
    newer.release()


class StoppedClock:
    """The clock of an attempt that is stopped in the middle of writing its lease: another one takes over meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.taken: StateManager | None = None
        self.armed = False

    def __call__(self) -> float:
        if self.armed and self.taken is None:
            self.taken = StateManager.acquire(self.folder, "run", clock=lambda: 10_000.0)
        return 0.0


def test_an_older_attempt_that_was_stopped_in_its_write_cannot_hide_the_newer_one(tmp_path: Path) -> None:
    """It passed its look at the fence, was stopped, and writes after the newer one has: the newer word stands in both files."""
    clock = StoppedClock(tmp_path)
    older = StateManager.acquire(tmp_path, "run", clock=clock)
    late = LeaseFile(tmp_path / "run", "run", older.attempt, clock)
    clock.armed = True
    late.write(30.0)
    assert clock.taken is not None
    for lease_read in (read_lease(tmp_path / "run"), Lease.model_validate_json((tmp_path / "run" / "lease.json").read_text())):
        assert lease_read is not None
        assert (lease_read.attempt, lease_read.released) == (2, False)
    (tmp_path / "run" / "lease.json").write_text(own_lease_path(tmp_path / "run", 1).read_text())
    held = read_lease(tmp_path / "run")
    assert held is not None
    assert held.attempt == 2, "even if it had been stopped again before it looked"
    clock.taken.release()


def test_a_lease_of_an_older_version_is_believed(tmp_path: Path) -> None:
    """It wrote lease.json alone."""
    state = StateManager.acquire(tmp_path, "run")
    own_lease_path(tmp_path / "run", 1).unlink()
    held = read_lease(tmp_path / "run")
    assert held is not None
    assert held.pid == os.getpid()
    state.release()


def test_only_the_newest_attempt_leaves_a_lease_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        StateManager.acquire(tmp_path, "run").release()
    assert [path.name for path in (tmp_path / "run" / "leases").iterdir()] == ["attempt-0003.json"]


def test_a_store_that_goes_away_is_waited_for_and_nothing_is_made_in_its_place(tmp_path: Path) -> None:
    """Moved away under the run: the journal's next line waits until it is back."""
    said: list[str] = []
    root, away = tmp_path / "store", tmp_path / "away"
    state = StateManager.acquire(root, "run", patience=Patience(30.0, said.append))
    root.rename(away)
    back = threading.Timer(0.6, lambda: away.rename(root))
    back.start()
    line = state.emit(Noted(text="after"))
    back.join()
    assert [item.event for item in state.lines()] == [line.event]
    assert [text.split(" (")[0] for text in said] == ["the store is gone", "the store is back: going on"]
    state.release()


def test_a_store_that_stays_away_is_exit_73_and_nothing_is_made(tmp_path: Path) -> None:
    """Bounded: the second who asks does not wait again; a folder of the same name that somebody else began is not ours."""
    root, away = tmp_path / "store", tmp_path / "away"
    state = StateManager.acquire(root, "run", patience=Patience(0.3))
    root.rename(away)
    for act in (lambda: state.emit(Noted(text="lost")), state.fence):
        with pytest.raises(StoreUnavailable, match="did not come back") as caught:
            act()
        assert caught.value.exit_code == 73
    assert not root.exists()
    other = StateManager.acquire(root, "run")
    with pytest.raises(StoreUnavailable):
        state.emit(Noted(text="into somebody else's journal"))
    assert other.lines() == []
    other.release()
    root.rename(tmp_path / "theirs")
    away.rename(root)
    state.emit(Noted(text="back"))
    assert len(state.lines()) == 1
    state.release()


def test_of_many_starts_in_the_same_moment_exactly_one_may_publish(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    states: list[StateManager] = []

    def start() -> None:
        barrier.wait()
        with contextlib.suppress(RunHeld):
            states.append(StateManager.acquire(tmp_path, "run"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [state.fenced_by() is None for state in states].count(True) == 1
    for state in states:
        state.release()


def test_the_journal_goes_on_over_attempts_as_one_hash_chain(tmp_path: Path) -> None:
    for number in range(3):
        state = StateManager.acquire(tmp_path, "run")
        state.emit(Noted(text=f"a {number}"))
        state.emit(Noted(text=f"b {number}"))
        state.release()
    lines = read_journal(tmp_path / "run" / "journal")
    raw = [line for path in sorted((tmp_path / "run" / "journal").iterdir()) for line in path.read_bytes().splitlines()]
    assert [line.sequence for line in lines] == list(range(6))
    assert [line.attempt for line in lines] == [1, 1, 2, 2, 3, 3]
    assert [line.previous_sha256 for line in lines] == [GENESIS_SHA256, *(hashlib.sha256(item).hexdigest() for item in raw[:-1])]


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_line_cut_by_a_crash_is_dropped_and_the_chain_goes_on_from_the_last_whole_one(tmp_path: Path, cut: int) -> None:
    first = StateManager.acquire(tmp_path, "run")
    whole = first.emit(Noted(text="whole"))
    first.emit(Noted(text="cut by a crash"))
    path = tmp_path / "run" / "journal" / "attempt-0001.jsonl"
    kept, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(kept + last[:cut])
    first.release()
    second = StateManager.acquire(tmp_path, "run")
    line = second.emit(Noted(text="after"))
    assert [item.event for item in second.lines()] == [whole.event, Noted(text="after")]
    assert line.sequence == 1
    assert line.previous_sha256 == hashlib.sha256(kept.rstrip(b"\n")).hexdigest()
    second.release()


def test_events_of_many_threads_are_whole_and_numbered_without_gaps(tmp_path: Path) -> None:
    state = StateManager.acquire(tmp_path, "run")
    threads = [threading.Thread(target=lambda: [state.emit(Noted(text="x" * 500)) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line.sequence for line in state.lines()] == list(range(100))
    state.release()


def test_a_store_that_is_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    with pytest.raises(StoreUnavailable, match="store"):
        StateManager.acquire(tmp_path / "store", "run")


def test_a_small_file_that_cannot_be_replaced_stays_as_it_was_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "lease.json"
    target.mkdir()  # replacing a folder by a file fails after everything was written
    with pytest.raises(StoreUnavailable, match=r"lease\.json"):
        write_atomically(target, "new")
    assert list(tmp_path.iterdir()) == [target]
