"""The manager against a real file system: full, unwilling to delete, used five hundred times."""

import gc
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mem_core.domain.errors import StoreUnavailable
from mem_core.domain.events import Noted
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.testing.checkpoint_run import SHARDS, Run, draft, proven, save, stage


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_full_is_told_with_numbers_and_survived(small_disk: Path) -> None:
    """Refused before the save, refused in the middle of a commit, older one intact each time; goes on when space is back."""
    run = Run(small_disk / "demo")
    manager = run.attempt()
    proven(manager, 1)
    with pytest.raises(StoreUnavailable, match=r"MiB free.*at least 13\.0 MiB free"):
        manager.new_staging(2, expected_bytes=10 << 20)
    staging = stage(manager, 2)
    hog = small_disk / "hog"
    with pytest.raises(OSError, match="No space left"):
        hog.write_bytes(bytes(8 << 20))
    with pytest.raises(StoreUnavailable, match=r"disk is full at .*free") as caught:
        manager.commit(2, staging, draft(2))
    assert caught.value.exit_code == 73
    assert [(info.step, info.state) for info in manager.listing()] == [(1, "valid")]
    hog.unlink()
    manager.commit(2, staging, draft(2))
    assert manager.validate(2).valid
    newest = run.attempt(2).newest_valid()
    assert newest is not None
    assert newest.step == 2


class NoDeletion(OsDisk):
    """A disk that lets nothing be removed or moved away from the checkpoints."""

    def __init__(self) -> None:
        self.unwilling = False

    def rename(self, old: Path, new: Path) -> None:
        if self.unwilling and old.parent.name == "checkpoints":
            raise PermissionError(1, "Operation not permitted", str(old))
        super().rename(old, new)

    def remove_file(self, path: Path) -> None:
        if self.unwilling:
            raise PermissionError(1, "Operation not permitted", str(path))
        super().remove_file(path)


def test_deletion_failure_never_fails_training(tmp_path: Path) -> None:
    disk = NoDeletion()
    run = Run(tmp_path / "demo")
    manager = run.attempt(disk=disk, section={"keep_last": 1})
    proven(manager, 1, 2)
    disk.unwilling = True
    assert manager.rotate().remove == (1,)
    assert "could not be deleted" in run.seen(Noted)[-1].text
    assert manager.newest_valid() is not None
    disk.unwilling = False
    assert manager.rotate().remove == (1,)
    assert [info.step for info in manager.listing()] == [2]


def test_a_checkpoint_that_vanishes_under_rotation_is_no_error(tmp_path: Path) -> None:
    """Two owners deleting the same one."""

    class Vanishing(OsDisk):
        def rename(self, old: Path, new: Path) -> None:
            if new.name.startswith("trash-"):
                super().rename(old, tmp_path / "elsewhere")
            super().rename(old, new)

    run = Run(tmp_path / "demo")
    manager = run.attempt(disk=Vanishing(), section={"keep_last": 1})
    proven(manager, 1, 2)
    manager.rotate()
    assert [info.step for info in manager.listing()] == [2]


CHILD = """
import sys
from pathlib import Path
from mem_core.testing.checkpoint_run import Run, draft, stage
manager = Run(Path(sys.argv[1])).attempt(int(sys.argv[2]), section={"keep_last": 2})
newest = manager.newest_valid()
step = newest.step if newest else 0
while True:
    step += 1
    manager.commit(step, stage(manager, step), draft(step))
    print(step, flush=True)
    manager.validate(step)
    manager.rotate()
"""


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_at_random_moments_of_saving(tmp_path: Path, kills: int) -> None:
    """SIGKILL of a real process that only saves: each successor resumes at or after the last step that was told committed."""
    rng = random.Random(kills)
    run = Run(tmp_path / "demo")
    for attempt in range(1, kills + 1):
        arguments = [sys.executable, "-c", CHILD, str(run.folder), str(attempt)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None
            told = [child.stdout.readline()]
            time.sleep(rng.random() * 0.3)
            child.kill()
            told += child.stdout.read().splitlines()
        newest = run.attempt(attempt + 1_000).newest_valid(recheck=True)
        shutil.rmtree(run.folder / "staging")  # the checking attempt's own, which would shut the next child out
        assert newest is not None
        assert newest.step >= int(told[-1])
    assert len(list((run.folder / "checkpoints").iterdir())) <= 4


def test_commit_while_another_is_judged(tmp_path: Path) -> None:
    """Background use: step 2 is committed and 1 rotated in while the validator of step 1 is still at work."""
    entered, go_on = threading.Event(), threading.Event()
    run = Run(tmp_path / "demo")

    def slow(*arguments: object) -> object:
        from mem_core.testing.checkpoint_run import judge_bytes

        entered.set()
        assert go_on.wait(30)
        return judge_bytes(*arguments)  # type: ignore[arg-type]

    manager = run.attempt(validator=slow)  # type: ignore[arg-type]
    save(manager, 1)
    judging = threading.Thread(target=manager.validate, args=(1,))
    judging.start()
    assert entered.wait(30)
    save(manager, 2)
    manager.rotate()
    go_on.set()
    judging.join(30)
    assert [(info.step, info.state) for info in manager.listing()] == [(1, "valid"), (2, "unvalidated")]


@pytest.mark.parametrize("total", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_many_saves_grow_nothing(tmp_path: Path, total: int) -> None:
    """File descriptors stay equal and resident memory within 4 MiB; two checkpoints and an empty desk are left on disk."""
    run = Run(tmp_path / "demo")
    manager = run.attempt(section={"keep_last": 2})
    process = psutil.Process(os.getpid())

    def saves(start: int, count: int) -> tuple[int, int]:
        for step in range(start, start + count):
            proven(manager, step)
            manager.rotate()
            run.events.clear()
        gc.collect()
        return process.num_fds(), process.memory_info().rss

    fds_before, rss_before = saves(1, 50)
    fds_after, rss_after = saves(51, total - 50)
    assert fds_after == fds_before
    assert rss_after - rss_before < 4 << 20
    assert [info.step for info in manager.listing()] == [total - 1, total]
    assert sorted(path.name for path in (run.folder / "staging" / "attempt-1").rglob("*")) == ["desk"]
    assert len(list((run.folder / "checkpoints").rglob("*.pt"))) == 2 * len(SHARDS)
