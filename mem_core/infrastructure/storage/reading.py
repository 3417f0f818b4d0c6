"""The one way in which MEM opens a file to read it: a plain file, of a size that can belong there, or a refusal at once.

`open()` of a pipe waits until somebody writes to it, of a terminal until somebody types; a device may act on being opened, and a file
that says it has a terabyte takes the memory of whoever reads it whole. Whatever lies at a path that MEM reads may be one of these, since
folders are shared, mounted, restored and written by other programs. Links are followed: a model folder of a hub's cache is made of them.
"""

import errno
import json
import os
import shutil
import stat
import sys
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

MAX_JSON_DEPTH = 100
_HELD_OPEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
# What one record can come to; a journal of the longest run stays below the larger one.
RECORD_LIMIT_BYTES = 64 << 20
JOURNAL_LIMIT_BYTES = 1 << 30
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotPlain(OSError):
    """What lies there is no plain file, or larger than anything that belongs there. `strerror` says which, in words for people."""


def local_name(path: str) -> str:
    """A local path as every field of a request means it: `file://` taken off, `~` and `~user` as home folders.

    Variables of the environment are not filled in, for any field: a request may come from elsewhere, and an error about the path would
    print what they hold.
    """
    return os.path.expanduser(path.removeprefix("file://"))


def open_regular(path: Path | str) -> BufferedReader:
    """Open a plain file to read bytes. Never waits.

    Raises:
        OSError: as `open` raises, `NotPlain` and `IsADirectoryError` among it.
    """
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: Path | str) -> int:
    """As `open_regular`, for `os.pread` and maps. The caller closes it."""
    try:
        _refuse_other_kinds(os.stat(path).st_mode, path)  # before the opening: a device may act on it
        # Non-blocking, since it may have become a pipe since; a plain file does not know the difference.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError as exc:  # a NUL byte in the name
        raise NotPlain(errno.EINVAL, "no file can have this name", str(path)) from exc
    try:
        _refuse_other_kinds(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path | str, limit_bytes: int) -> bytes:
    """The content of a plain file of at most `limit_bytes`.

    Raises:
        OSError: as `open_regular`; `NotPlain` where it is longer.
    """
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > limit_bytes:
            raise NotPlain(errno.EFBIG, f"it has {size_bytes} bytes where at most {limit_bytes} can belong", str(path))
        return _bounded(file.read(limit_bytes + 1), limit_bytes, str(path))


def copy_regular(source: Path | str, target: Path | str) -> None:
    """Copy a plain file. A device would have no end.

    Raises:
        OSError: as `open_regular`, and what writing raises.
    """
    os.close(open_descriptor(source))
    shutil.copyfile(source, target)


def read_handed(path: str, limit_bytes: int) -> bytes:
    """At most `limit_bytes` of what a user hands to a command: a plain file, or what is held open for it: `-` for standard input, or a
    shell's `<(command)`, which is a pipe with a writer.

    Raises:
        OSError: as `read_regular`.
    """
    if path == "-":
        return _bounded(sys.stdin.buffer.read(limit_bytes + 1), limit_bytes, "standard input")
    if path.startswith(_HELD_OPEN):
        with open(path, "rb") as stream:
            return _bounded(stream.read(limit_bytes + 1), limit_bytes, path)
    return read_regular(path, limit_bytes)


def _bounded(content: bytes, limit_bytes: int, path: str) -> bytes:
    if len(content) > limit_bytes:
        raise NotPlain(errno.EFBIG, f"it has more than the {limit_bytes} bytes that can belong there", path)
    return content


def read_regular_text(path: Path | str, limit_bytes: int) -> str:
    """The same as UTF-8 text.

    Raises:
        OSError: as `read_regular`. UnicodeDecodeError: it is no text.
    """
    return read_regular(path, limit_bytes).decode("utf-8")


def read_json(path: Path | str, limit_bytes: int = RECORD_LIMIT_BYTES) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: as `read_regular`. ValueError: as `parse_json`.
    """
    return parse_json(read_regular(path, limit_bytes))


def parse_json(raw: bytes | str) -> Any:
    """JSON that can be walked, printed and stored: not nested beyond `MAX_JSON_DEPTH`, and all its text can be encoded.

    Raises:
        ValueError: it is not that. Never RecursionError.
    """
    try:
        content = json.loads(raw)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    except ValueError as exc:
        raise ValueError(f"it is no JSON: {exc}") from exc
    level: list[Any] = [content]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            break
    else:
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")
    escape = b"\\u" if isinstance(raw, bytes) else "\\u"
    if escape in raw:  # type: ignore[operator]
        _refuse_half_characters(content)
    return content


def why(exc: Exception) -> str:
    """The reason of a failed reading in words for people: without the path, which the message names by itself."""
    return str(getattr(exc, "strerror", None) or exc or type(exc).__name__)


def _inside(item: Any) -> Any:
    if isinstance(item, dict):
        return cast("dict[str, Any]", item).values()
    return cast("list[Any]", item) if isinstance(item, list) else ()


def _refuse_half_characters(content: Any) -> None:
    """Half of a surrogate pair is text in JSON and Python, and can be neither printed nor stored."""
    try:
        json.dumps(content, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise ValueError("it holds half a character (a lone surrogate)") from exc


def _refuse_other_kinds(mode: int, path: Path | str) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no plain file")
    if kind == "a folder":
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file", str(path))
    raise NotPlain(errno.EINVAL, f"it is {kind}, not a plain file", str(path))
