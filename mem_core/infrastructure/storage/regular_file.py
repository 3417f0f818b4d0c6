"""Plain files only: opening a named pipe waits for ever, a device never ends, and a folder fails in words that name nothing."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotAPlainFile(OSError):
    """Something stands where a file belongs. `strerror` says what."""


class TooLarge(OSError):
    """The file is larger than what it is for could ever need."""


def open_plain(path: Path | str) -> BufferedReader:
    """The file for reading; never waits.

    Raises:
        NotAPlainFile: a folder, pipe, socket or device. OSError: missing or not readable. ValueError: no path at all (a NUL in it).
    """
    _refuse_other(os.stat(path).st_mode, path)  # before opening, since opening a device may already act on it
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _refuse_other(os.fstat(descriptor).st_mode, path)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_plain(path: Path | str, limit_bytes: int) -> bytes:
    """The whole content of a file of at most `limit_bytes`.

    Raises:
        TooLarge, and what `open_plain` raises.
    """
    with open_plain(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise TooLarge(errno.EFBIG, f"it has more than {limit_bytes} bytes", str(path))
    return content


def _refuse_other(mode: int, path: Path | str) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for matches, name in _KINDS if matches(mode)), "no file")
        raise NotAPlainFile(errno.EINVAL, f"it is {kind}, not a plain file", str(path))
