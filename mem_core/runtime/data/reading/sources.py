"""Which files a data list means: `stdlib:`, local files and globs, fsspec URLs. Decided by name, size and first bytes."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast

from mem_core.domain.capabilities import PARQUET, refusal
from mem_core.domain.errors import DataError, RequestError
from mem_core.domain.request import DataSection
from mem_core.domain.units import Value
from mem_core.infrastructure.storage.reading import local_name, open_regular
from mem_core.runtime.data.reading.globbing import matching_files
from mem_core.runtime.models.encoding import CURRENT_RULES

STDLIB_SOURCE = "stdlib:"
STDLIB_CAP_BYTES = 12_000_000
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_JSONL_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_FOLDER_REMEDY = "Give files or a glob such as folder/*.jsonl"
_HEAD_BYTES = 4_096
_DEFAULT_TEXT_FIELD = "text"
Kind = Literal["text", "jsonl"]


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
            kind = _kind(path, data, field, rules, lambda: stream.read(_HEAD_BYTES))
        return _stamped(os.path.abspath(path), kind)
    except FileNotFoundError as exc:
        raise DataError("no such file", field=field, value=path, remedy="Check the path") from exc
    except OSError as exc:
        raise DataError(
            f"the file cannot be read: {exc.strerror}", field=field, value=path, remedy="Give a plain file that this user may read"
        ) from exc


def _stamped(path: str, kind: Kind) -> SourceFile:
    stat = os.stat(path)
    stamp = f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_ino}-{stat.st_dev}"
    return SourceFile(
        path=path, kind=kind, size_bytes=stat.st_size, stamp=stamp, modified_unix_ns=max(stat.st_mtime_ns, stat.st_ctime_ns),
        identity=f"{stat.st_dev}:{stat.st_ino}" if stat.st_ino else os.path.realpath(path),
    )  # fmt: skip


def unchanged(file: SourceFile) -> bool:
    """Whether a local file still carries the stamp that it had when it was resolved."""
    try:
        return file.is_remote or _stamped(file.path, file.kind).stamp == file.stamp
    except OSError:
        return False


def _kind(path: str, data: DataSection, field: str, rules: int, head: Callable[[], bytes]) -> Kind:
    """What is asked for decides, then the name; `head` gives the first bytes where that is not enough."""
    suffix = PurePosixPath(path).suffix.lower()
    if data.format == "parquet" or (data.format == "auto" and suffix == PARQUET):
        raise refusal("parquet", field, path)
    if rules > 1 and _row_fields(data):
        if data.format == "text":
            raise _no_fields("data.format: text", data)
        return "jsonl"
    if data.format != "auto":
        return cast(Kind, data.format)
    if suffix in _JSONL_SUFFIXES:
        return "jsonl"
    named = rules > 1 and data.text_field != _DEFAULT_TEXT_FIELD
    return "jsonl" if named and head().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") else "text"


def _row_fields(data: DataSection) -> list[str]:
    return [name for name in ("messages_field", "prompt_field", "completion_field") if getattr(data, name) is not None]


def _no_fields(what: str, data: DataSection) -> RequestError:
    return RequestError(
        f"data.{' and data.'.join(_row_fields(data))} ask for rows with fields, and {what} has none",
        field="data",
        remedy="Give JSONL files, or leave the fields out to train on plain text",
    )


def _stdlib_files(data: DataSection, rules: int) -> list[SourceFile]:
    """Python's own sources without tests and installed packages, by relative path, the first 12 MB of them.

    The cap keeps preparation to seconds and alike from one Python to the next.
    """
    if rules > 1 and _row_fields(data):
        raise _no_fields(STDLIB_SOURCE, data)
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
    fs, root = _filesystem(source, field)
    try:
        names = sorted(cast(list[str], fs.glob(root))) if glob.has_magic(root) else [root]
        entries = [fs.info(name) for name in names]
    except FileNotFoundError as exc:
        raise DataError("no such object", field=field, value=source, remedy="Check the URL") from exc
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(f"cannot be read: {exc}", field=field, value=source, remedy="Check the URL, endpoint and keys") from exc
    found = [entry for entry in entries if entry["type"] != "directory"]
    if not found:
        problem = "this is a folder" if entries else "the glob matches no object"
        raise DataError(problem, field=field, value=source, remedy=_FOLDER_REMEDY)
    kinds: list[Kind] = [_kind(entry["name"], data, field, rules, partial(_remote_head, fs, entry["name"])) for entry in found]
    return [_remote_file(fs.unstrip_protocol(entry["name"]), entry, kind) for entry, kind in zip(found, kinds, strict=True)]


def _remote_file(path: str, entry: dict[str, Any], kind: Kind) -> SourceFile:
    """An object without any tag gets an empty stamp: nothing tells whether it has changed."""
    tags = [str(entry.get(key) or "") for key in ("ETag", "etag", "LastModified", "mtime", "created", "md5Hash", "version_id")]
    size_bytes = int(entry.get("size") or 0)
    stamp = "-".join((str(size_bytes), *tags)) if any(tags) else ""
    return SourceFile(path=path, kind=kind, size_bytes=size_bytes, stamp=stamp, identity=path)


def _remote_head(fs: Any, path: str) -> bytes:
    try:
        return cast(bytes, fs.cat_file(path, start=0, end=_HEAD_BYTES))
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(f"cannot be read: {exc}", field="data", value=path, remedy="Check the URL, endpoint and keys") from exc


def _filesystem(url: str, field: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, root = fsspec.url_to_fs(url)
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(f"cannot be opened: {exc}", field=field, value=url, remedy="Check the URL's protocol and endpoint") from exc
    fs.invalidate_cache()
    return fs, cast(str, root)


@contextmanager
def open_source(file: SourceFile) -> Iterator[BinaryIO]:
    """The file's bytes, whatever it lies on.

    Raises:
        DataError: it cannot be opened any more.
    """
    try:
        if file.is_remote:
            fs, path = _filesystem(file.path, "data")
            stream = cast(BinaryIO, fs.open(path, "rb"))
        else:
            stream = open_regular(file.path)
    except DataError:
        raise
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(
            f"the file cannot be read: {exc}", field="data", value=file.path, remedy="Check the file and its permissions"
        ) from exc
    with stream:
        yield stream
