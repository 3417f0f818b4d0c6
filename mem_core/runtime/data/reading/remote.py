"""Files that fsspec reads: S3, https and whatever else a URL names."""

import glob
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

from mem_core.domain.errors import DataError
from mem_core.runtime.data.reading.folders import one_kind

HEAD_BYTES = 4_096
_FOLDER_REMEDY = "Give files or a glob such as folder/*.jsonl"


class RemoteFile:
    """An object behind a URL: its whole name, and what tells that it has changed; an empty stamp where nothing does."""

    def __init__(self, url: str, entry: dict[str, Any]) -> None:
        self.url = url
        self.name = str(entry["name"])
        self.size_bytes = int(entry.get("size") or 0)
        tags = [str(entry.get(key) or "") for key in ("ETag", "etag", "LastModified", "mtime", "created", "md5Hash", "version_id")]
        self.stamp = "-".join((str(self.size_bytes), *tags)) if any(tags) else ""
        self.head = b""


def remote_files(source: str, field: str, *, folders: bool, heads: bool) -> list[RemoteFile]:
    """The objects that a URL or a glob of them means; of a folder all below it, where `folders`. `heads`: with their first bytes.

    Raises:
        DataError: nothing there, a folder, or not readable.
    """
    fs, root = filesystem(source, field)
    is_folder = False
    try:
        names = sorted(cast(list[str], fs.glob(root))) if glob.has_magic(root) else [root]
        entries = [fs.info(name) for name in names]
        if folders and len(entries) == 1 and entries[0]["type"] == "directory" and names == [root]:
            is_folder = True
            entries = [fs.info(name) for name in sorted(cast(list[str], fs.find(root)))]
    except FileNotFoundError as exc:
        raise DataError("no such object", field=field, value=source, remedy="Check the URL") from exc
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(f"cannot be read: {exc}", field=field, value=source, remedy="Check the URL, endpoint and keys") from exc
    found = [RemoteFile(fs.unstrip_protocol(entry["name"]), entry) for entry in entries if entry["type"] != "directory"]
    if is_folder:
        kept = set(one_kind(source, [file.url for file in found], field))
        found = [file for file in found if file.url in kept]
    if not found:
        problem = "this is a folder" if entries else "the glob matches no object"
        raise DataError(problem, field=field, value=source, remedy=_FOLDER_REMEDY)
    if heads:
        _add_heads(fs, found)
    return found


def _add_heads(fs: Any, files: Sequence[RemoteFile]) -> None:
    """All at once, where the backend can."""
    ends = [min(HEAD_BYTES, file.size_bytes) or HEAD_BYTES for file in files]
    try:
        heads = fs.cat_ranges([file.name for file in files], [0] * len(files), ends)
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(f"cannot be read: {exc}", field="data", value=files[0].url, remedy="Check the URL, endpoint and keys") from exc
    for file, head in zip(files, heads, strict=True):
        if isinstance(head, Exception):
            raise DataError(f"cannot be read: {head}", field="data", value=file.url, remedy="Check the URL, endpoint and keys") from head
        file.head = bytes(head)


def filesystem(url: str, field: str) -> tuple[Any, str]:
    """The backend of a URL and the path in it.

    Raises:
        DataError: no backend takes it.
    """
    import fsspec

    try:
        fs, root = fsspec.url_to_fs(url)
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise DataError(f"cannot be opened: {exc}", field=field, value=url, remedy="Check the URL's protocol and endpoint") from exc
    fs.invalidate_cache()
    return fs, cast(str, root)


def open_remote(url: str) -> BinaryIO:
    """The object's bytes. Raises DataError, and whatever the backend raises."""
    fs, path = filesystem(url, "data")
    return cast(BinaryIO, fs.open(path, "rb"))
