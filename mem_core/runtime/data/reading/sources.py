"""Which files a data list means: `stdlib:`, local files and globs, fsspec URLs. Decided by name, size and first bytes."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.domain.units import Value
from mem_core.infrastructure.storage.reading import local_name, open_regular
from mem_core.runtime.data.reading.folders import files_of_folder
from mem_core.runtime.data.reading.globbing import matching_files
from mem_core.runtime.data.reading.kinds import DEFAULT_TEXT_FIELD, Kind, kind_of, kind_until_3, no_fields, row_fields
from mem_core.runtime.data.reading.packing import DAMAGED, Packing, packing_of, unpacked
from mem_core.runtime.data.reading.remote import HEAD_BYTES, open_remote, remote_files
from mem_core.runtime.models.encoding import CURRENT_RULES

STDLIB_SOURCE = "stdlib:"
STDLIB_CAP_BYTES = 12_000_000
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_FOLDER_REMEDY = "Give files or a glob such as folder/*.jsonl"


class SourceFile(Value):
    """One file of a data list. `stamp` changes whenever the file may have changed, without reading it; `identity` is the same
    under each of a file's names.
    """

    path: str
    kind: Kind
    size_bytes: int
    stamp: str
    modified_unix_ns: int = 0
    identity: str = ""
    packing: Packing = ""
    source: int = 0  # which of weighted sources it belongs to

    @property
    def is_table(self) -> bool:
        """Whether its rows are no lines."""
        return self.kind not in ("text", "jsonl")

    @property
    def is_remote(self) -> bool:
        """Whether it is read through fsspec."""
        return is_url(self.path)


def is_url(path: str) -> bool:
    """Whether a path needs fsspec; `file://` does not."""
    return "://" in path and not path.startswith("file://")


def resolve_files(sources: Iterable[str], data: DataSection, field: str, rules: int = CURRENT_RULES) -> tuple[SourceFile, ...]:
    """The files behind a data list, in its order; a glob's files in the order of their names. A file may come several times.

    Raises:
        DataError: nothing there, a folder or another thing that is no file, or not readable.
        RequestError: a format that is not supported yet, or that has none of the fields that the request asks for.
    """
    return tuple(file for source in sources for file in _resolve(source, data, field, rules))


def each_once(files: Iterable[SourceFile]) -> tuple[tuple[SourceFile, ...], tuple[str, ...]]:
    """Each real file under the first of its names, and a note for those that came again."""
    kept: dict[str, SourceFile] = {}
    again: list[str] = []
    for file in files:
        first = kept.setdefault(file.identity or file.path, file)
        if first is not file:
            again.append(f"{file.path} is {first.path}")
    if not again:
        return tuple(kept.values()), ()
    more = f" and {len(again) - 3} more" if len(again) > 3 else ""
    return tuple(kept.values()), (f"files that are named several times count once: {'; '.join(again[:3])}{more}",)


def _resolve(source: str, data: DataSection, field: str, rules: int) -> list[SourceFile]:
    if "\0" in source:
        raise DataError("a NUL character is part of no path", field=field, value=repr(source), remedy="Check the path")
    if source == STDLIB_SOURCE:
        return _stdlib_files(data, rules)
    if is_url(source):
        return _remote_files(source, data, field, rules)
    path = local_name(source)
    if glob.has_magic(path) and not os.path.exists(path):
        names = _matching(path, field, rules)
        if not names:
            raise DataError("the glob matches no file", field=field, value=source, remedy="Check the pattern and the folder")
        return [_local_file(name, data, field, rules) for name in names]
    if rules > 3 and os.path.isdir(path):
        return [_local_file(name, data, field, rules) for name in files_of_folder(path, field)]
    return [_local_file(path, data, field, rules)]


def _matching(pattern: str, field: str, rules: int) -> list[str]:
    if rules == 1:
        return sorted(name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name))
    try:
        return matching_files(pattern)
    except ValueError as exc:
        raise DataError(f"the glob cannot be used: {exc}", field=field, value=pattern, remedy="Check the pattern") from exc


def _local_file(path: str, data: DataSection, field: str, rules: int) -> SourceFile:
    if os.path.isdir(path):
        raise DataError("this is a folder", field=field, value=path, remedy=_FOLDER_REMEDY)
    try:
        with open_regular(path) as stream:
            kind, packing = _shape(path, data, rules, stream.read(HEAD_BYTES), partial(_head_inside, stream, path))
        return _stamped(os.path.abspath(path), kind, packing)
    except FileNotFoundError as exc:
        raise DataError("no such file", field=field, value=path, remedy="Check the path") from exc
    except OSError as exc:
        raise DataError(
            f"the file cannot be read: {exc.strerror}", field=field, value=path, remedy="Give a plain file that this user may read"
        ) from exc


def _head_inside(stream: BinaryIO, path: str, packing: Packing) -> bytes:
    stream.seek(0)
    try:
        return unpacked(stream, packing).read(HEAD_BYTES)
    except DAMAGED as exc:
        raise damaged(path, packing, exc) from exc


def damaged(path: str, packing: Packing, exc: Exception) -> DataError:
    """The refusal of a compressed file that is cut or is not what its first bytes say."""
    return DataError(f"the {packing} file cannot be unpacked: {exc}", field="data", value=path, remedy="Download or write it again")


def _stamped(path: str, kind: Kind, packing: Packing = "") -> SourceFile:
    stat = os.stat(path)
    stamp = f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_ino}-{stat.st_dev}"
    return SourceFile(
        path=path, kind=kind, size_bytes=stat.st_size, stamp=stamp, modified_unix_ns=max(stat.st_mtime_ns, stat.st_ctime_ns),
        identity=f"{stat.st_dev}:{stat.st_ino}" if stat.st_ino else os.path.realpath(path), packing=packing,
    )  # fmt: skip


def unchanged(file: SourceFile) -> bool:
    """Whether a local file still carries the stamp that it had when it was resolved."""
    try:
        return file.is_remote or _stamped(file.path, file.kind).stamp == file.stamp
    except OSError:
        return False


def _stdlib_files(data: DataSection, rules: int) -> list[SourceFile]:
    """Python's own sources without tests and installed packages, by relative path, the first 12 MB of them.

    The cap keeps preparation to seconds and alike from one Python to the next.
    """
    if rules > 1 and row_fields(data):
        raise no_fields(STDLIB_SOURCE, data)
    root = Path(sysconfig.get_path("stdlib"))
    files: list[SourceFile] = []
    total = 0
    for relative in sorted(_stdlib_paths(root)):
        file = _stamped(str(root / relative), "text")
        if not file.size_bytes:
            continue
        if total + file.size_bytes > STDLIB_CAP_BYTES:
            break
        total += file.size_bytes
        files.append(file)
    if not files:
        raise DataError(f"{root} holds no Python sources", field="data.train", value=STDLIB_SOURCE, remedy="Give own files instead")
    return files


def _stdlib_paths(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        for name in names:
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _remote_files(source: str, data: DataSection, field: str, rules: int) -> list[SourceFile]:
    """An object without any tag gets an empty stamp: nothing tells whether it has changed."""
    found = remote_files(source, field, folders=rules > 3, heads=rules > 3 or data.text_field != DEFAULT_TEXT_FIELD)
    files: list[SourceFile] = []
    for remote in found:
        kind, packing = _shape(remote.name, data, rules, remote.head, partial(_remote_head, remote.url))
        files.append(
            SourceFile(path=remote.url, kind=kind, size_bytes=remote.size_bytes, stamp=remote.stamp, identity=remote.url, packing=packing)
        )
    return files


def _remote_head(url: str, packing: Packing) -> bytes:
    try:
        with open_remote(url) as stream:
            return unpacked(stream, packing).read(HEAD_BYTES)
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(f"cannot be read: {exc}", field="data", value=url, remedy="Check the URL, endpoint and keys") from exc


def _shape(path: str, data: DataSection, rules: int, raw: bytes, inside: Callable[[Packing], bytes]) -> tuple[Kind, Packing]:
    """As what a file is read that begins with `raw`, and how it is compressed; `inside` gives the beginning of what is in it."""
    if rules <= 3:
        return kind_until_3(path, data, rules, lambda: raw), ""
    packing = packing_of(raw)
    return kind_of(path, data, lambda: inside(packing) if packing else raw), packing


@contextmanager
def open_source(file: SourceFile) -> Iterator[BinaryIO]:
    """The file's bytes, whatever it lies on.

    Raises:
        DataError: it cannot be opened any more.
    """
    try:
        stream = open_remote(file.path) if file.is_remote else open_regular(file.path)
    except DataError:
        raise
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(
            f"the file cannot be read: {exc}", field="data", value=file.path, remedy="Check the file and its permissions"
        ) from exc
    with stream:
        yield stream
