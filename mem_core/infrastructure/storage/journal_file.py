"""Appending one line durably to a file that a crash, a full disk or a store that is away for a moment must not spoil."""

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mem_core.infrastructure.storage.reading import JOURNAL_LIMIT_BYTES, NotPlain, open_descriptor, read_regular
from mem_core.infrastructure.storage.writing import SHARED, open_append

_ATTEMPT_NAME = re.compile(r"^attempt-([0-9]{4,18})\.jsonl$")
PATIENCE_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)


def attempt_files(folder: Path) -> list[tuple[int, Path]]:
    """(attempt, file) of each `attempt-000N.jsonl`, in the order of attempts; a copy of one, or what an editor left, is none of them.

    Raises:
        OSError: the folder cannot be looked at. One that is not there has none.
    """
    try:
        matches = [(_ATTEMPT_NAME.match(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def read_attempt(path: Path) -> bytes:
    """The content of one attempt's file. Raises OSError."""
    return read_regular(path, JOURNAL_LIMIT_BYTES)


def probe_attempt(path: Path) -> None:
    """Raises OSError where `read_attempt` would, without reading."""
    descriptor = open_descriptor(path)
    try:
        size_bytes = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size_bytes > JOURNAL_LIMIT_BYTES:
        raise NotPlain(errno.EFBIG, f"it has {size_bytes} bytes, more than any journal", str(path))


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
    with open_append(path, SHARED) as file:
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
