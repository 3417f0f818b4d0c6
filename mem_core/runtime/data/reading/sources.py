"""Which files a data list means: `stdlib:`, local files and globs, fsspec URLs. Decided by name and size, before anything is read."""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast

from mem_core.domain.capabilities import PARQUET, refusal
from mem_core.domain.errors import DataError
from mem_core.domain.units import Value
from mem_core.infrastructure.storage.reading import open_descriptor, open_regular

STDLIB_SOURCE = "stdlib:"
STDLIB_CAP_BYTES = 12_000_000
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_JSONL_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_FOLDER_REMEDY = "Give files or a glob such as folder/*.jsonl"


class SourceFile(Value):
    """One file of a data list. `stamp` changes whenever the file may have changed, without reading it."""

    path: str
    kind: Literal["text", "jsonl"]
    size_bytes: int
    stamp: str
    modified_unix_ns: int = 0

    @property
    def is_remote(self) -> bool:
        """Whether it is read through fsspec."""
        return is_url(self.path)


def is_url(path: str) -> bool:
    """Whether a path needs fsspec; `file://` does not."""
    return "://" in path and not path.startswith("file://")


def resolve_files(sources: Iterable[str], data_format: str, field: str) -> tuple[SourceFile, ...]:
    """The files behind a data list, in its order; a glob's files in the order of their names.

    Raises:
        DataError: nothing there, a folder, or not readable.
        RequestError: a format that this build cannot read.
    """
    return tuple(file for source in sources for file in _resolve(source, data_format, field))


def _resolve(source: str, data_format: str, field: str) -> list[SourceFile]:
    if source == STDLIB_SOURCE:
        return _stdlib_files()
    if is_url(source):
        return _remote_files(source, data_format, field)
    path = source.removeprefix("file://")
    if glob.has_magic(path) and not os.path.exists(path):
        names = sorted(name for name in glob.glob(path, recursive=True) if not os.path.isdir(name))
        if not names:
            raise DataError("the glob matches no file", field=field, value=source, remedy="Check the pattern and the folder")
        return [_local_file(name, data_format, field) for name in names]
    return [_local_file(path, data_format, field)]


def _local_file(path: str, data_format: str, field: str) -> SourceFile:
    if os.path.isdir(path):
        raise DataError("this is a folder", field=field, value=path, remedy=_FOLDER_REMEDY)
    kind = _kind(path, data_format, field)
    try:
        os.close(open_descriptor(path))
        absolute = os.path.abspath(path)
        return _stamped(absolute, kind)
    except FileNotFoundError as exc:
        raise DataError("no such file", field=field, value=path, remedy="Check the path") from exc
    except OSError as exc:
        raise DataError(
            f"the file cannot be read: {exc.strerror}", field=field, value=path, remedy="Give this user read permission"
        ) from exc


def _stamped(path: str, kind: Literal["text", "jsonl"]) -> SourceFile:
    stat = os.stat(path)
    stamp = f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_ino}-{stat.st_dev}"
    return SourceFile(path=path, kind=kind, size_bytes=stat.st_size, stamp=stamp, modified_unix_ns=max(stat.st_mtime_ns, stat.st_ctime_ns))


def unchanged(file: SourceFile) -> bool:
    """Whether a local file still carries the stamp that it had when it was resolved."""
    try:
        return file.is_remote or _stamped(file.path, file.kind).stamp == file.stamp
    except OSError:
        return False


def _kind(path: str, data_format: str, field: str) -> Literal["text", "jsonl"]:
    suffix = PurePosixPath(path).suffix.lower()
    if data_format == "parquet" or (data_format == "auto" and suffix == PARQUET):
        raise refusal("parquet", field, path)
    if data_format == "auto":
        return "jsonl" if suffix in _JSONL_SUFFIXES else "text"
    return cast(Literal["text", "jsonl"], data_format)


def _stdlib_files() -> list[SourceFile]:
    """Python's own sources without tests and installed packages, by relative path, the first 12 MB of them.

    The cap keeps preparation to seconds and alike from one Python to the next.
    """
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


def _remote_files(source: str, data_format: str, field: str) -> list[SourceFile]:
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
    return [_remote_file(fs.unstrip_protocol(entry["name"]), entry, data_format, field) for entry in found]


def _remote_file(path: str, entry: dict[str, Any], data_format: str, field: str) -> SourceFile:
    """An object without any tag gets an empty stamp: nothing tells whether it has changed."""
    tags = [str(entry.get(key) or "") for key in ("ETag", "etag", "LastModified", "mtime", "created", "md5Hash", "version_id")]
    size_bytes = int(entry.get("size") or 0)
    stamp = "-".join((str(size_bytes), *tags)) if any(tags) else ""
    return SourceFile(path=path, kind=_kind(path, data_format, field), size_bytes=size_bytes, stamp=stamp)


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
    if file.is_remote:
        fs, path = _filesystem(file.path, "data")
        mode_open = fs.open
    else:
        path, mode_open = file.path, lambda path, mode: open_regular(path)
    try:
        stream = cast(BinaryIO, mode_open(path, "rb"))
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(
            f"the file cannot be read: {exc}", field="data", value=file.path, remedy="Check the file and its permissions"
        ) from exc
    with stream:
        yield stream
