"""Names that a pattern with `**` matches, in trees where links lead back up: each real folder is gone through once."""

import fnmatch
import glob
import os
from collections.abc import Iterator

_MOST_PARTS = 200
Seen = set[tuple[int, int, int]]


def matching_files(pattern: str) -> list[str]:
    """What `glob.glob(pattern, recursive=True)` finds without the folders, by name; with `**`, whatever links there are, in linear time.

    Raises:
        ValueError: more parts than any real path has.
    """
    if "**" not in pattern.split("/"):
        return sorted(name for name in glob.glob(pattern) if not os.path.isdir(name))
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    parts = [part for at, part in enumerate(parts) if part != "**" or parts[at - 1 : at] != ["**"]]
    if len(parts) > _MOST_PARTS:
        raise ValueError(f"the pattern has {len(parts)} parts")
    return sorted(name for name in set(_expand("/" if pattern.startswith("/") else "", tuple(parts), set())) if not os.path.isdir(name))


def _expand(folder: str, parts: tuple[str, ...], seen: Seen) -> Iterator[str]:
    head, rest = parts[0], parts[1:]
    if head == "**":
        yield from _anywhere(folder, parts, seen)
    elif glob.has_magic(head):
        for name in _names(folder, head):
            yield from _further(os.path.join(folder, name), rest, seen)
    elif os.path.lexists(os.path.join(folder, head)):
        yield from _further(os.path.join(folder, head), rest, seen)


def _further(path: str, rest: tuple[str, ...], seen: Seen) -> Iterator[str]:
    if not rest:
        yield path
    elif os.path.isdir(path):
        yield from _expand(path, rest, seen)


def _anywhere(folder: str, parts: tuple[str, ...], seen: Seen) -> Iterator[str]:
    try:
        status = os.stat(folder or ".")
    except OSError:
        return
    place = (status.st_dev, status.st_ino, len(parts))
    if place in seen:
        return
    seen.add(place)
    rest = parts[1:]
    if rest:
        yield from _expand(folder, rest, seen)
    for name in _names(folder, "*"):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            yield from _anywhere(path, parts, seen)
        elif not rest:
            yield path


def _names(folder: str, pattern: str) -> list[str]:
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return []
    return sorted(name for name in fnmatch.filter(names, pattern) if pattern.startswith(".") or not name.startswith("."))
