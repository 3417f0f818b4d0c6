"""Rows of files that are no lines: one JSON array, CSV and TSV, parquet, Arrow. Each row as an object, as a line of JSONL would be.

Called by `units`. Rows come in order and in bounded memory: of an array one element, of a table a batch of rows at a time.
"""

import codecs
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from mem_core.domain.request import DataSection
from mem_core.runtime.data.reading.kinds import Kind
from mem_core.runtime.data.reading.messages import UNREAD_COLUMNS
from mem_core.runtime.data.reading.refused import FileRefused, RowRefused, kind_name

BLOCK_BYTES = 2**20
# An element of an array, or a line of CSV, that is longer is no row of text any more.
MOST_ROW_BYTES = 2**28
_BATCH_ROWS = 256
_BOM = "\ufeff"
_SPACE = " \t\r\n"
# A value that is cut off fails so near its end, but for a string, which fails where it begins: a longer escape or word there is none.
_CUT_CHARS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table. `number` counts from 1: the element, the row, or in CSV the line on which the row ends."""

    number: int
    content: dict[str, Any] | RowRefused


def table_rows(stream: BinaryIO, kind: Kind, data: DataSection) -> Iterator[Row]:
    """The rows of a file that is no lines, from its first on.

    Raises:
        FileRefused: it is not what its name or its first bytes say. OSError and its kin as the stream raises.
    """
    if kind == "json":
        return _array(stream)
    if kind in ("csv", "tsv"):
        return _csv(stream, "," if kind == "csv" else "\t")
    return _columns(stream, kind, data)


# -- one JSON array -----------------------------------------------------------------------------------------------------------


def _array(stream: BinaryIO) -> Iterator[Row]:
    text = _Text(stream)
    if text.next_sign() != "[":
        raise FileRefused(1, "no JSON array, where one is due", "Set data.format to jsonl if each line is a row")
    text.take_sign()
    number = 0
    if text.next_sign() == "]":
        text.take_sign()
    else:
        sign = ","
        while sign == ",":
            number += 1
            text.next_sign()
            yield Row(number, text.take_element(number))
            sign = text.next_sign()
            text.take_sign()
        if sign != "]":
            raise FileRefused(
                number, f"element {number} of the array is followed by neither a comma nor the array's end", "Repair the file"
            )
    if text.next_sign():
        raise FileRefused(number, "text after the end of the array", "Set data.format to jsonl if each line is a row")


class _Text:
    """The text of a stream, from where it was read to; as much of it in memory as its longest element."""

    def __init__(self, stream: BinaryIO) -> None:
        self._blocks = _decoded(stream)
        self._waiting = ""
        self._at = 0
        self._decoder = json.JSONDecoder()

    def next_sign(self) -> str:
        """The next character that is no white space, without taking it; empty at the end."""
        while True:
            while self._at < len(self._waiting):
                if self._waiting[self._at] not in _SPACE:
                    return self._waiting[self._at]
                self._at += 1
            if not self._more():
                return ""

    def take_sign(self) -> None:
        """Go on by that character."""
        self._at += 1

    def take_element(self, number: int) -> dict[str, Any] | RowRefused:
        """The value that begins here.

        Raises:
            FileRefused: it is no JSON, so that nothing tells where the next one begins.
        """
        want = BLOCK_BYTES
        while True:
            try:
                value, end = self._decoder.raw_decode(self._waiting, self._at)
            except RecursionError as exc:
                raise FileRefused(number, f"element {number} of the array is nested too deeply", "Repair the file") from exc
            except ValueError as exc:
                if not self._is_cut(exc) or not self._grow(want):
                    what = f"element {number} of the array is no JSON, or the file is cut off: {exc}"
                    raise FileRefused(number, what, "Repair the file, or write its rows as JSONL, where bad ones can be skipped") from exc
                want *= 2  # what has to be gone through again stays a share of what is new
                continue
            if end == len(self._waiting) and self._more():
                continue  # a number may go on
            self._at = end
            if isinstance(value, dict):
                return cast(dict[str, Any], value)
            return RowRefused(f"{kind_name(value)} where an object is due")

    def _is_cut(self, exc: ValueError) -> bool:
        """Whether what was read may be the beginning of a value, so that more of a large file is worth its memory."""
        return isinstance(exc, json.JSONDecodeError) and (
            exc.pos >= len(self._waiting) - _CUT_CHARS or exc.msg.startswith("Unterminated string")
        )

    def _grow(self, size: int) -> bool:
        before = len(self._waiting) - self._at
        while len(self._waiting) - self._at < before + size and self._more():
            pass
        if len(self._waiting) - self._at > MOST_ROW_BYTES:
            return False
        return len(self._waiting) - self._at > before

    def _more(self) -> bool:
        block = next(self._blocks, "")
        self._waiting, self._at = self._waiting[self._at :] + block, 0
        return bool(block)


def _decoded(stream: BinaryIO) -> Iterator[str]:
    decoder, offset = codecs.getincrementaldecoder("utf-8-sig")(), 0
    while block := stream.read(BLOCK_BYTES):
        try:
            text = decoder.decode(block)
        except UnicodeDecodeError as exc:
            raise _not_utf8(exc, offset) from exc
        offset += len(block)
        if text:
            yield text
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as exc:
        raise _not_utf8(exc, offset) from exc


def _not_utf8(exc: UnicodeDecodeError, offset: int) -> FileRefused:
    what = f"not UTF-8: byte 0x{exc.object[exc.start]:02x} near byte offset {offset + exc.start} of the file"
    return FileRefused(1, what, "Convert it: iconv -f CP1252 -t UTF-8, or whatever it was written in")


# -- CSV and TSV --------------------------------------------------------------------------------------------------------------


def _csv(stream: BinaryIO, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader(_lines(stream), delimiter=delimiter, strict=True)
    try:
        names = next((row for row in reader if row), None)
        if names is None:
            return
        names = [name.strip() for name in names]
        _check_names(names, delimiter)
        for row in reader:
            if row:
                yield Row(reader.line_num, _named(names, row))
    except csv.Error as exc:
        raise FileRefused(
            reader.line_num, f"no rows separated by {delimiter!r}: {exc}", "Repair the line, or write the file again"
        ) from exc


def _check_names(names: Sequence[str], delimiter: str) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise FileRefused(1, f"two columns are called '{min(twice)[:40]}'", "Give each column a name of its own in the first line")
    other = next((sign for sign in ";\t,|" if sign != delimiter and sign in names[0]), None)
    if len(names) == 1 and other is not None:
        remedy = "Set data.format to tsv" if other == "\t" else "Set data.format to csv" if other == "," else "Write it with commas"
        raise FileRefused(1, f"one column alone, and its name holds {other!r}: the columns are separated by that", remedy)


def _named(names: Sequence[str], row: Sequence[str]) -> dict[str, Any] | RowRefused:
    if len(row) != len(names):
        return RowRefused(f"{len(row)} {'column' if len(row) == 1 else 'columns'} where the first line names {len(names)}")
    return dict(zip(names, row, strict=True))


def _lines(stream: BinaryIO) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(stream):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as exc:
            what = f"not UTF-8: byte 0x{exc.object[exc.start]:02x} at byte offset {offset + exc.start} of the file"
            raise FileRefused(number + 1, what, "Convert it: iconv -f CP1252 -t UTF-8, or whatever it was written in") from exc
        yield text.removeprefix(_BOM) if number == 0 else text
        offset += len(line)


# -- parquet and Arrow --------------------------------------------------------------------------------------------------------


def _columns(stream: BinaryIO, kind: Kind, data: DataSection) -> Iterator[Row]:
    import pyarrow as pa

    try:
        batches = _parquet(stream, data) if kind == "parquet" else _arrow(stream, data)
        number = 0
        for batch in batches():
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in batch.slice(start, _BATCH_ROWS).to_pylist():
                    number += 1
                    yield Row(number, {name: _plain(value) for name, value in row.items()})
    except (pa.ArrowException, OSError, EOFError) as exc:
        raise FileRefused(0, f"the {kind} file cannot be read: {exc}", "Download or write it again") from exc


def _parquet(stream: BinaryIO, data: DataSection) -> Callable[[], Iterator[Any]]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream, pre_buffer=False)
    names = _needed(file.schema_arrow.names, data)
    return lambda: file.iter_batches(batch_size=_BATCH_ROWS, columns=names, use_threads=False)


def _arrow(stream: BinaryIO, data: DataSection) -> Callable[[], Iterator[Any]]:
    import pyarrow as pa

    is_file = stream.read(8).startswith(b"ARROW1")
    stream.seek(0)
    reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
    names = _needed(reader.schema.names, data)
    batches = (lambda: (reader.get_batch(at) for at in range(reader.num_record_batches))) if is_file else (lambda: iter(reader))
    return lambda: (batch.select(names) for batch in batches())


def _needed(names: Sequence[str], data: DataSection) -> list[str]:
    """The columns that a request's rows are made of, and those whose rows have to be refused; pictures and the like are not read.

    All of them where one that the request names is missing: then somebody is told what there is instead.
    """
    named = {data.messages_field} if data.messages_field else {data.prompt_field, data.completion_field} - {None} or {data.text_field}
    if not named <= set(names):
        return list(names)
    wanted = {*named, data.context_field, "tools", *UNREAD_COLUMNS}
    return [name for name in names if name in wanted]


def _plain(value: Any) -> Any:
    """Columns give every object of a list all the fields that any of them has; a line of JSONL would not have those without a value.

    The content of a message alone stays, since templates ask for it by name.
    """
    if isinstance(value, list):
        return [_plain(item) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {name: _plain(item) for name, item in items if item is not None or (name == "content" and "role" in value)}
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")  # what is no text is refused where it is used, as half a surrogate pair is
    return value if value is None or isinstance(value, str | int | float) else str(value)
