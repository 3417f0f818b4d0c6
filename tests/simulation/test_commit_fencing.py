"""I6 by exhaustion: an attempt is stopped before each of its storage calls, a newer one takes over, the old one wakes up and goes on.

The old one's own check of the lease is fooled on purpose (it passed just before the stop): only the storage protocol can hold it.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_commit_crash_points import History, Protocol, content, fresh_disk, open_manager, save

from mem_core.domain.checkpoint import CheckpointDraft, CheckpointManifest, TrainingPosition
from mem_core.domain.errors import RunHeld
from mem_core.runtime.checkpoint_manager import CheckpointManager
from mem_core.testing.checkpoint_run import Run, proven
from mem_core.testing.memory_disk import MemoryDisk

SHARDS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
Act = Callable[[CheckpointManager, MemoryDisk], None]


def staged(manager: CheckpointManager, disk: MemoryDisk, step: int) -> Path:
    staging = manager.new_staging(step)
    for name in SHARDS:
        disk.write(staging / name, content(name, step))
    return staging


def draft(step: int) -> CheckpointDraft:
    return CheckpointDraft(position=TrainingPosition(applied_steps=step, batch_index=step), weights_digest=f"old-{step}")


def commit_new(manager: CheckpointManager, disk: MemoryDisk) -> None:
    manager.commit(4, staged(manager, disk, 4), draft(4))


def commit_over(manager: CheckpointManager, disk: MemoryDisk) -> None:
    manager.commit(3, staged(manager, disk, 3), draft(3))


def validate(manager: CheckpointManager, disk: MemoryDisk) -> None:
    manager.validate(3)


def quarantine(manager: CheckpointManager, disk: MemoryDisk) -> None:
    disk.damage(manager.path_of(3) / SHARDS[0])
    manager.validate(3)


def rotate(manager: CheckpointManager, disk: MemoryDisk) -> None:
    manager.rotate()


def pin(manager: CheckpointManager, disk: MemoryDisk) -> None:
    manager.pin(2)


class TakeOverAt:
    """A `before` hook: at the n-th call of any kind, another attempt takes over and its view is kept."""

    def __init__(self, point: int, disk: MemoryDisk) -> None:
        self._left, self._disk = point, disk
        self.newest: CheckpointManifest | None = None
        self.state: dict[str, bytes] = {}
        self.happened = False

    def __call__(self, operation: str, path: Path) -> None:
        if self._left == 0 and not self.happened:
            self.happened = True
            self._disk.before = None
            newer = open_manager(self._disk, 2, History(), Protocol())
            self.newest = newer.newest_valid()
            save(self._disk, newer, 9, History(), Protocol())
            self.state = visible(self._disk)
        self._left -= 1


def visible(disk: MemoryDisk) -> dict[str, bytes]:
    """All that a reader believes: checkpoints, pins, quarantine."""
    return {path: data for path, data in disk.files().items() if "/staging/" not in path}


@pytest.mark.parametrize("act", [commit_new, commit_over, validate, quarantine, rotate, pin], ids=lambda act: act.__name__)
def test_a_stopped_attempt_changes_nothing_after_a_newer_one_began(act: Act) -> None:
    """Every storage call of every writing method; afterwards all that readers see is what the newer attempt left."""
    tried = 0
    for point in range(400):
        disk, history = fresh_disk(Protocol()), History()
        old = open_manager(disk, 1, history, Protocol())
        for step in (1, 2):
            save(disk, old, step, history, Protocol())
            old.pin(step) if step == 1 else None
        old.commit(3, staged(old, disk, 3), draft(3))
        old.validate(3) if act is rotate else None
        hook = TakeOverAt(point, disk)
        disk.before = hook
        try:
            act(old, disk)
        except (RunHeld, FileNotFoundError):  # the latter from the ranks' own writes into a folder that was taken away
            pass
        else:
            assert not hook.happened or visible(disk) == hook.state, f"point {point}: the old attempt believes that it succeeded"
        if not hook.happened:
            break
        tried += 1
        assert visible(disk) == hook.state, f"point {point}: the old attempt changed what readers see"
    else:
        raise AssertionError("more than 400 calls")
    assert tried > 5


CHILD = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from mem_core.testing.checkpoint_run import Run, SHARDS, draft, stage
    from mem_core.infrastructure.storage.disk import OsDisk

    CALLS = "write sync_file sync_folder make_folder rename remove_file remove_folder entries kind digest".split()

    class StopsAt(OsDisk):
        left = None
        def __getattribute__(self, name):
            if name in CALLS:
                if StopsAt.left == 0:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if StopsAt.left is not None:
                    StopsAt.left -= 1
            return super().__getattribute__(name)

    run = Run(Path(sys.argv[1]))
    manager = run.attempt(1, disk=StopsAt(), section={"keep_last": 1})
    staging = stage(manager, 5)
    StopsAt.left = int(sys.argv[2])
    manager.commit(5, staging, draft(5))
    manager.validate(5)
    manager.rotate()
""")


def wait_until_stopped(child: subprocess.Popen[bytes]) -> bool:
    """True once SIGSTOP took effect; False if the child ended."""
    for _ in range(3_000):
        done, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED)
        if done and os.WIFSTOPPED(status):
            return True
        if done:
            child.returncode = os.waitstatus_to_exitcode(status)
            return False
        time.sleep(0.01)
    raise AssertionError("neither stopped nor ended within 30 s")


def stop_and_take_over(tmp_path: Path, point: int) -> int | None:
    """A real process stopped by SIGSTOP at a storage call. Returns its exit code, or None if it had fewer calls."""
    run = Run(tmp_path / f"run-{point}")
    proven(run.attempt(1), 1)
    arguments = [str(run.folder), str(point)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stderr=subprocess.DEVNULL)
    try:
        if not wait_until_stopped(child):
            return None
        newer = run.attempt(2, section={"keep_last": 1})
        newer.newest_valid()
        proven(newer, 7)
        before = {str(path) for path in run.folder.rglob("*") if "staging" not in str(path)}
        child.send_signal(signal.SIGCONT)
        _, status = os.waitpid(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert {str(path) for path in run.folder.rglob("*") if "staging" not in str(path)} == before, f"point {point}"
    finally:
        if child.returncode is None:
            child.kill()
            child.wait()
    return child.returncode


@pytest.mark.parametrize("point", [0, 9, 17, 24])
def test_sigstop_between_check_and_write(tmp_path: Path, point: int) -> None:
    """The old process also learns that it was shut out."""
    assert stop_and_take_over(tmp_path, point) == 1


@pytest.mark.slow
def test_sigstop_at_every_storage_call(tmp_path: Path) -> None:
    """Nothing that readers see changes; an exit code of 0 is right only where all that was left to do was its own trash."""
    codes: list[int] = []
    while (code := stop_and_take_over(tmp_path, len(codes))) is not None:
        codes.append(code)
    assert len(codes) > 40
    assert set(codes[:35]) == {1}
