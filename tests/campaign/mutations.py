"""What can become of bytes, of JSON and of a name on a disk, drawn from a seed. The same seed draws the same."""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, float("inf"), float("nan"), 2**31, 2**63, 10**30, -(10**30), "", "x", "auto", "nan",
    "\0", "\ud800", "../x", "/etc/passwd", "~nosuchuser/x", "a" * 300, "a" * 5_000, "9" * 5_000, "\x1b]0;title\x07",
    "http://me:hunter2-canary@host/x", "https://host/x?token=hunter2-canary",
    [], [None], ["\0"], {}, {"": ""}, {"a": {"b": {"c": [1, {"d": 2}]}}}, [[[[[[]]]]]],
)  # fmt: skip
SECRET = "hunter2-canary"


def deep(levels: int) -> Any:
    """Lists within lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def bent_bytes(draw: random.Random, content: bytes) -> bytes:
    """One to three damages of a kind that disks, editors and programs do."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        content = draw.choice(BYTE_DAMAGES)(draw, content)
    return content


def _flip(draw: random.Random, content: bytes) -> bytes:
    if not content:
        return b"\1"
    bent = bytearray(content)
    bent[draw.randrange(len(bent))] ^= 1 << draw.randrange(8)
    return bytes(bent)


def _zeroed(draw: random.Random, content: bytes) -> bytes:
    start, size = draw.randrange(len(content) + 1), draw.choice((1, 64, 4_096))
    return content[:start] + bytes(min(size, len(content) - start)) + content[start + size :]


def _overwritten(draw: random.Random, content: bytes) -> bytes:
    start, size = draw.randrange(len(content) + 1), draw.choice((1, 8, 512))
    return content[:start] + draw.randbytes(min(size, len(content) - start)) + content[start + size :]


def _inserted(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content) + 1)
    return content[:start] + draw.choice((b"\0", b"\n", b"\xff", b"{", b"]", b'"', b"\\u0000", draw.randbytes(9))) + content[start:]


def _repeated(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content) + 1)
    stop = min(len(content), start + draw.choice((10, 1_000)))
    return content[:stop] + content[start:]


BYTE_DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip, _flip, _zeroed, _overwritten, _inserted, _repeated,
    lambda draw, content: content[: draw.randrange(len(content) + 1)],
    lambda draw, content: content + draw.randbytes(draw.choice((1, 100, 5_000))),
    lambda draw, content: b"",
    lambda draw, content: draw.randbytes(len(content)),
    lambda draw, content: content[draw.randrange(len(content) + 1) :],
)  # fmt: skip


def bent_json(draw: random.Random, value: Any) -> Any:
    """The same JSON with one value, key or item changed, gone, moved or nested deeply."""
    value = json.loads(json.dumps(value))
    holders = _holders(value)
    if not holders or draw.random() < 0.05:
        return draw.choice((*ODD_VALUES, deep(5_000 if draw.random() < 0.3 else 150)))
    holder = draw.choice(holders)
    key = draw.choice(list(holder) if isinstance(holder, dict) else list(range(len(holder))))
    what = draw.randrange(6)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[draw.choice(("extra", "", "\0", str(key) + "s"))] = holder.pop(key)
    elif what == 2:
        other = draw.choice(holders)
        if other:
            holder[key] = json.loads(json.dumps(draw.choice(list(other.values()) if isinstance(other, dict) else list(other))))
    elif what == 3:
        holder[key] = deep(draw.choice((50, 150, 500)))
    else:
        holder[key] = draw.choice(ODD_VALUES)
    return value


def _holders(value: Any) -> list[Any]:
    found, waiting = [], [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list) and item:
            found.append(item)
            waiting += list(item.values()) if isinstance(item, dict) else item
    return found


def written(value: Any) -> bytes:
    """JSON, also of what JSON cannot say: too deep, half characters, NaN."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 5_000 + b"]" * 5_000


def bent_document(draw: random.Random, content: bytes) -> bytes:
    """A JSON file, bent as JSON more often than as bytes."""
    try:
        return written(bent_json(draw, json.loads(content))) if draw.random() < 0.7 else bent_bytes(draw, content)
    except (ValueError, RecursionError):
        return bent_bytes(draw, content)


PLACES = ("pipe", "folder", "full folder", "dangling link", "loop", "link to another", "device", "socket", "huge")


def put_in_place(draw: random.Random, path: Path, kind: str, others: list[Path]) -> None:
    """Something else under a file's name. `others` are files that a link may lead to."""
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "full folder":
            path.mkdir()
            (path / "x").write_text("x")
        case "dangling link":
            path.symlink_to("nowhere")
        case "loop":
            path.symlink_to(path.name)
        case "link to another":
            path.symlink_to(draw.choice([other for other in others if other != path] or [Path("/etc/hostname")]))
        case "device":
            path.symlink_to(draw.choice(("/dev/zero", "/dev/null", "/dev/full")))
        case "socket":
            _bind(path)
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 41)
        case _:
            raise AssertionError(kind)


def _bind(path: Path) -> None:
    """A socket's path has to be short, so it is reached through an open folder."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    finally:
        os.close(descriptor)


def swap(first: Path, second: Path) -> None:
    """Two files, or two folders, each under the other's name."""
    aside = first.with_name(f"{first.name}.swapping")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def copy_tree(source: Path, target: Path) -> None:
    """A copy that a damage may be done to."""
    shutil.copytree(source, target, symlinks=True)
