"""Locks of killed op builds: found by who has them open, never taken from a builder that lives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mem_core.infrastructure.machine.build import find_stale_locks, observe_build, remove_stale_locks

HOLD = """
import sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
print(baton.try_acquire(), flush=True)
sys.stdin.readline()
"""


def make_lock(folder: Path, age_s: float = 60) -> Path:
    lock = folder / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    stamp = lock.stat().st_mtime - age_s
    os.utime(lock, (stamp, stamp))
    return lock


def test_a_lock_that_nobody_has_open_is_stale_and_is_removed(tmp_path: Path) -> None:
    lock = make_lock(tmp_path)
    (found,) = find_stale_locks(tmp_path)
    assert (found.path, found.stale) == (str(lock), True)
    assert remove_stale_locks(tmp_path) == (str(lock),)
    assert not lock.exists()


def test_a_lock_just_made_is_left_alone(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, age_s=0)
    assert not find_stale_locks(tmp_path)[0].stale
    assert remove_stale_locks(tmp_path) == ()
    assert lock.exists()


def test_the_lock_of_a_living_builder_stays_until_it_is_killed(tmp_path: Path) -> None:
    """With PyTorch's own lock in a real process, killed as an OOM killer would."""
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    builder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert builder.stdout is not None
        assert builder.stdout.readline().strip() == "True"
        stamp = lock.stat().st_mtime - 3600
        os.utime(lock, (stamp, stamp))
        (found,) = find_stale_locks(tmp_path)
        assert not found.stale
        assert str(builder.pid) in found.reason
        assert remove_stale_locks(tmp_path) == ()
    finally:
        builder.kill()
        builder.communicate(timeout=30)
    assert remove_stale_locks(tmp_path) == (str(lock),)


def test_on_a_shared_filesystem_only_age_tells(tmp_path: Path) -> None:
    """The builder may be on another machine, where its open file cannot be seen."""
    ops = tmp_path / "ops"
    lock = make_lock(ops, age_s=0)
    fake = tmp_path / "root"
    (fake / "proc").mkdir(parents=True)
    (fake / "proc" / "mounts").write_text(f"server:/home {ops} nfs4 rw 0 0\n/dev/vda / ext4 rw 0 0\n")
    now = lock.stat().st_mtime
    assert not find_stale_locks(ops, fake, now_unix_s=now + 599)[0].stale
    assert find_stale_locks(ops, fake, now_unix_s=now + 601)[0].stale


def test_no_folder_has_no_locks(tmp_path: Path) -> None:
    assert find_stale_locks(tmp_path / "none") == ()


def environ(path: str = os.environ.get("PATH", ""), **more: str) -> dict[str, str]:
    return {"PATH": path, **more}


def test_without_compiler_and_ninja_each_is_named(tmp_path: Path) -> None:
    seen = observe_build(tmp_path, environ(path=str(tmp_path)))
    assert (seen.compiler, seen.ninja) == ("", "")
    assert "not on PATH" in seen.compiler_problem
    assert "ninja" in seen.ninja_problem


@pytest.mark.parametrize("compiler", ["/bin/false", "/nonexistent/g++"])
def test_a_compiler_that_does_not_run_is_none(tmp_path: Path, compiler: str) -> None:
    seen = observe_build(tmp_path, environ(CXX=compiler))
    assert seen.compiler == ""
    assert compiler.split("/")[-1] in seen.compiler_problem


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    seen = observe_build(tmp_path / "a" / "b", environ())
    assert seen.folder_writable
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_a_killed_linker_left_short_is_broken(tmp_path: Path) -> None:
    import _ctypes

    whole = Path(_ctypes.__file__).read_bytes()
    for name, content in (("good", whole), ("short", whole[: len(whole) // 2]), ("empty", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").write_bytes(content)
    seen = observe_build(tmp_path, environ())
    assert seen.built_ops == ("good",)
    assert [op.split(" ")[0] for op in seen.broken_ops] == ["empty", "short"]
