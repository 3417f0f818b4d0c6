"""How MEM makes small files: whole or not at all, and for whom.

Records, leases and journals follow the umask, so that a group can share a store. Logs and requests may hold what a user typed or a library
said, so they are for their owner alone. Opening something to append to it never waits, whatever lies there.
"""

import contextlib
import errno
import os
import stat
import uuid
from pathlib import Path
from typing import BinaryIO, cast

from mem_core.infrastructure.storage.reading import NotPlain

PRIVATE = 0o600
SHARED = 0o666  # and what the umask takes away


def replace_text(path: Path, text: str, mode: int = SHARED) -> None:
    """Replace a small file as a whole: a reader sees the old or the new text, after a crash too. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def open_to_append(path: Path, mode: int = PRIVATE) -> BinaryIO:
    """A plain file to append to, made where there is none. What else lies there is set aside under another name, and never waited for.

    Raises:
        OSError: it can be neither opened nor set aside.
    """
    try:
        return open_append(path, mode)
    except (NotPlain, IsADirectoryError):
        path.rename(path.with_name(f"{path.name}.not-a-file-{uuid.uuid4().hex[:8]}"))
        return open_append(path, mode)


def open_append(path: Path, mode: int) -> BinaryIO:
    """A plain file to append to, made where there is none; never waits. Raises OSError, `NotPlain` among it."""
    with contextlib.suppress(FileNotFoundError):
        _refuse_other_kinds(os.stat(path), path)  # before the opening: a device may act on it
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags, mode)
    try:
        _refuse_other_kinds(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return cast(BinaryIO, os.fdopen(descriptor, "ab"))


def _refuse_other_kinds(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotPlain(errno.EINVAL, "it is no plain file", str(path))
