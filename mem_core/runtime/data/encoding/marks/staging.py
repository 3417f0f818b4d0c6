"""Folders in which preparations are at work, and what is left of those that were killed.

A folder is locked by the process that fills it (`flock`, which the kernel drops at death), so that leftovers of the dead are told from the
living. The one that is asked for the same again takes over what was left; what nobody asks for goes after a while.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mem_core.infrastructure.storage.sealed import remove_whatever
from mem_core.runtime.data.encoding.marks.ledger import has_mark

PREFIX = ".preparing-"
MARKS = "marks"
_NAME_CHARS = 32
MOST_LEFTOVERS = 3
LEFTOVER_S = 7 * 24 * 3_600.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def staging_folder(cache_dir: Path, asked: str) -> Iterator[tuple[Path, bool]]:
    """A locked folder for what is `asked` for, and whether the next one who asks will find it after a kill.

    It is gone afterwards, but for a disk that is full: once there is room, the next one goes on. While another process is at work on
    the same, this one gets a folder of its own.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock_file(cache_dir / ".lock") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        named = cache_dir / f"{PREFIX}{asked[:_NAME_CHARS]}"
        _sweep(cache_dir, named)
        holder = _locked(named)
        folder = named if holder is not None else Path(tempfile.mkdtemp(prefix=PREFIX, dir=cache_dir))
        if holder is None:
            holder = (folder / ".lock").open("w")
            fcntl.flock(holder, fcntl.LOCK_EX)
    keep = False
    try:
        yield folder, folder == named
    except OSError as exc:
        keep = exc.errno in _NO_SPACE and folder == named
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        holder.close()


def _locked(folder: Path) -> IO[bytes] | None:
    """The lock of a folder, which is made where it is not there; None where another process holds it. Raises OSError."""
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
        remove_whatever(folder)
    folder.mkdir(exist_ok=True)
    lock = _lock_file(folder / ".lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    os.utime(folder)
    return lock


def _lock_file(path: Path) -> IO[bytes]:
    """The lock file, opened without waiting; made anew where something else stands there. Raises OSError."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            remove_whatever(path)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666), "rb+")


def _sweep(cache_dir: Path, own: Path) -> None:
    """Leftovers of the dead: the newest few that somebody may go on from stay for some days, beside the one that is asked for."""
    folders = [folder for folder in cache_dir.glob(f"{PREFIX}*") if folder != own]
    kept = 0
    for folder in sorted(folders, key=_changed_unix_s, reverse=True):
        if folder.is_symlink() or not folder.is_dir():
            remove_whatever(folder)
        elif kept < MOST_LEFTOVERS and has_mark(folder / MARKS) and time.time() - _changed_unix_s(folder) < LEFTOVER_S:
            kept += 1
        else:
            _remove_dead(folder)
    for hashes in cache_dir.glob(".hashes-*"):
        with suppress(OSError):
            if time.time() - hashes.stat().st_mtime > 3_600:
                hashes.unlink()


def _remove_dead(folder: Path) -> None:
    with suppress(OSError), _lock_file(folder / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _changed_unix_s(folder: Path) -> float:
    with suppress(OSError):
        return max(os.lstat(path).st_mtime for path in (folder, *(path for path in [folder / MARKS] if path.exists())))
    return 0.0
