"""The first bytes of data files, cut where a row or a character ends."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.domain.units import Value
from mem_core.infrastructure.storage.reading import why
from mem_core.runtime.data.reading.packing import DAMAGED, unpacked
from mem_core.runtime.data.reading.refused import FileRefused
from mem_core.runtime.data.reading.sources import SourceFile, damaged, open_source
from mem_core.runtime.data.reading.tables import table_rows

TOTAL_BYTES = 2**22
_LEAST_BYTES = 2**14
_MOST_BYTES = 2**18
_MOST_REMOTE = 8
_MOST_TABLE_BYTES = 2**24


class Head(Value):
    """The beginning of a file; `whole` where that is all of it. Of a table on this machine `num_rows`, to be read from where it lies."""

    source: SourceFile
    content: bytes = b""
    whole: bool
    num_rows: int | None = None


def read_heads(files: Sequence[SourceFile], data: DataSection) -> tuple[Head, ...]:
    """The beginnings of as many files as a look of a second allows; those that have no end of a row in it are left out.

    Raises:
        DataError: a file cannot be read.
    """
    each_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, TOTAL_BYTES // max(1, len(files))))
    heads: list[Head] = []
    left_bytes, remote = TOTAL_BYTES, _MOST_REMOTE
    for file in files:
        if left_bytes < _LEAST_BYTES or (file.is_remote and not remote):
            continue
        remote -= file.is_remote
        head = _table_head(file, data, each_bytes) if file.is_table else _head(file, min(each_bytes, left_bytes))
        if head is not None:
            heads.append(head)
            left_bytes -= len(head.content)
    return tuple(heads)


def _table_head(file: SourceFile, data: DataSection, limit_bytes: int) -> Head | None:
    """So many rows as come to about `limit_bytes`; one that cannot be read is left to who reads it. A remote table is taken whole."""
    if file.is_remote:
        content = _read(file, _MOST_TABLE_BYTES + 1)
        return Head(source=file, content=content, whole=True) if len(content) <= _MOST_TABLE_BYTES else None
    num_rows, size_bytes = 0, 0
    with open_source(file) as raw, suppress(FileRefused, *DAMAGED):
        for row in table_rows(unpacked(raw, file.packing), file.kind, data):
            num_rows += 1
            size_bytes += len(repr(row.content))
            if size_bytes > limit_bytes:
                return Head(source=file, whole=False, num_rows=num_rows)
    return Head(source=file, whole=True, num_rows=num_rows + 1)


def _head(file: SourceFile, limit_bytes: int) -> Head | None:
    content = _read(file, limit_bytes + 1)
    file = file.model_copy(update={"packing": ""})
    if len(content) <= limit_bytes:
        return Head(source=file, content=content, whole=True)
    cut = _cut(content[:limit_bytes], file)
    return Head(source=file, content=cut, whole=False) if cut else None


def _cut(content: bytes, file: SourceFile) -> bytes:
    """Up to the last end of a line; a text without one up to the last whole character, rows without one not at all."""
    end = content.rfind(b"\n") + 1
    if end or file.kind == "jsonl":
        return content[:end]
    while content and content[-1] & 0xC0 == 0x80:
        content = content[:-1]
    return content[:-1] if content and content[-1] >= 0xC0 else content


def _read(file: SourceFile, size_bytes: int) -> bytes:
    try:
        if not file.is_remote or (file.packing and not file.is_table):
            with open_source(file) as stream:
                return unpacked(stream, "" if file.is_table else file.packing).read(size_bytes)
        import fsspec

        fs, path = cast(tuple[Any, str], fsspec.url_to_fs(file.path))
        return cast(bytes, fs.cat_file(path, start=0, end=size_bytes))
    except DataError:
        raise
    except DAMAGED as exc:
        if file.packing:
            raise damaged(file.path, file.packing, exc) from exc
        problem = why(exc)
    except Exception as exc:  # noqa: BLE001 - each fsspec backend has an error tree of its own
        problem = str(exc)
    raise DataError(f"the file cannot be read: {problem}", field="data", value=file.path, remedy="Check the file and its permissions")
