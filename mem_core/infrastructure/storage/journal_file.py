"""Appending one line durably to a file that a crash, a full disk or a store that is away for a moment must not spoil."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PATIENCE_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)


def append_line(path: Path, line: bytes, patience_s: Sequence[float] = PATIENCE_S, sleep: Callable[[float], None] = time.sleep) -> None:
    """Append `line` and a newline and have it on the disk when this returns.

    A write that fails leaves nothing of the line behind, and is tried again after each wait of `patience_s`: a disk that was
    full for some seconds costs a wait and not the run.

    Raises:
        OSError: the last try failed too.
    """
    size_bytes = _size_or_none(path)
    for wait_s in patience_s:
        try:
            return _append(path, line)
        except OSError:
            _cut(path, size_bytes)
            sleep(wait_s)
    try:
        _append(path, line)
    except OSError:
        _cut(path, size_bytes)
        raise


def _append(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _size_or_none(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _cut(path: Path, size_bytes: int | None) -> None:
    """A part of the line that got through would swallow the next one. Of a file that was not to be seen nothing is cut: it may be back."""
    if size_bytes is not None:
        with contextlib.suppress(OSError):
            os.truncate(path, size_bytes)
