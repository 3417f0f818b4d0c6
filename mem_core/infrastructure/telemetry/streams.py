"""The standard streams of a command: where they are closed, full or broken its words are lost, never its work or its exit code."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from mem_core.domain.printable import printable

INPUT, OUTPUT, ERRORS = 0, 1, 2


class SafeStream:
    """A text stream that never raises for what lies behind it, and shows control characters as text.

    After the first failure everything goes to the null device, also what children and C libraries write; `lost` says why.
    """

    def __init__(self, inner: TextIO, descriptor: int, *, escapes: bool = False) -> None:
        self._inner = inner
        self._descriptor = descriptor
        self._escapes = escapes
        self.lost: OSError | ValueError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def with_escapes(self) -> "SafeStream":
        """The same place for a display that draws with escape sequences and looks after its texts itself."""
        return SafeStream(self._inner, self._descriptor, escapes=True)

    def write(self, text: str) -> int:
        """As for any stream; answers the length even where it goes nowhere."""
        try:
            self._inner.write(text if self._escapes else printable(text))
        except (OSError, ValueError) as exc:
            self._lose(exc)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As for any stream."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """As for any stream."""
        try:
            self._inner.flush()
        except (OSError, ValueError) as exc:
            self._lose(exc)

    def _lose(self, exc: OSError | ValueError) -> None:
        self.lost = self.lost or exc
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)


def secure_standard_streams() -> None:
    """Make all three of this process usable, whatever it was started with. To be called once, before anything is opened.

    A closed descriptor is taken by the null device: else the next file or socket that is opened would get its number, and with it
    whatever is meant for standard output.
    """
    for descriptor in (INPUT, OUTPUT, ERRORS):
        _open_if_closed(descriptor)
    sys.stdin = sys.stdin or os.fdopen(INPUT, encoding="utf-8", closefd=False)
    sys.stdout = _secured(sys.stdout, OUTPUT)
    sys.stderr = _secured(sys.stderr, ERRORS)


def _open_if_closed(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        os.dup2(opened, descriptor)  # inheritable, as standard streams are
        if opened != descriptor:
            os.close(opened)
        else:
            os.set_inheritable(descriptor, True)


def _secured(stream: Any, descriptor: int) -> Any:
    if isinstance(stream, SafeStream):
        return stream
    inner = stream or os.fdopen(descriptor, "w", encoding="utf-8", closefd=False)
    with contextlib.suppress(AttributeError, ValueError):
        inner.reconfigure(errors="backslashreplace")  # a file name need not be text, nor a locale know every letter
    return SafeStream(inner, descriptor)


def terminal() -> Any:
    """Standard error for a display that writes escape sequences of its own."""
    stream = sys.stderr
    return stream.with_escapes() if isinstance(stream, SafeStream) else stream


def why_lost(stream: Any) -> str:
    """Why the words on a stream did not arrive; empty where they did, and where the reader left on purpose."""
    lost = getattr(stream, "lost", None)
    if lost is None or getattr(lost, "errno", None) == errno.EPIPE:
        return ""
    return str(getattr(lost, "strerror", None) or lost)
