"""Files to units of text: hashed, checked row by row, in bounded memory. A unit is a document, or a part of a very long one."""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.infrastructure.storage.reading import open_regular
from mem_core.runtime.data.reading.columns import Reading, names_no_field, recognised
from mem_core.runtime.data.reading.formats import HEAD_BYTES, foreign_format
from mem_core.runtime.data.reading.packing import DAMAGED, unpacked
from mem_core.runtime.data.reading.pieces import pieces
from mem_core.runtime.data.reading.refused import FileRefused
from mem_core.runtime.data.reading.rows import BadRow, Document, check_rows, check_table, first_object, not_utf8
from mem_core.runtime.data.reading.sources import SourceFile, damaged, open_source
from mem_core.runtime.data.reading.tables import table_rows

BLOCK_BYTES = 2**20
PART_CHARS = 2**18
# No tokenizer has words longer than this: text of more than (n + 1) * 256 characters has more than n tokens.
TOKEN_CHARS = 256


@dataclass(frozen=True, slots=True)
class Readable:
    """A file whose content is known: `path` is local, `source` is what messages name."""

    source: SourceFile
    path: str
    sha256: str
    hashed_unix_ns: int = 0
    most_rows: int | None = None  # of a table, where only its beginning is looked at


@dataclass(frozen=True, slots=True)
class Unit:
    """Text that stays together when rows are held out. `first` and `last`: it begins and ends its document."""

    document: Document
    key: bytes
    line: int
    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading begins in a plain file of lines: after so many lines, which are so many bytes."""

    line: int = 0
    offset_bytes: int = 0


Read = Unit | BadRow | None
_BEGINNING = Start()
_FIRST_ROWS = 100
_BINARY_KINDS = ("parquet", "arrow")


def hash_file(file: SourceFile, on_bytes: Callable[[int], None], copy_to: Path | None = None) -> str:
    """SHA-256 of the content, read once in blocks; also written to `copy_to`, for what does not lie on this machine.

    Raises:
        DataError: unreadable, or compressed.
    """
    digest = hashlib.sha256()
    with open_source(file) as stream:
        copy = copy_to.open("wb") if copy_to is not None else None
        try:
            first = True
            while block := stream.read(BLOCK_BYTES):
                if first:
                    _refuse_compressed(block, file)
                first = False
                digest.update(block)
                if copy is not None:
                    copy.write(block)
                on_bytes(len(block))
        finally:
            if copy is not None:
                copy.close()
    return digest.hexdigest()


def _refuse_compressed(block: bytes, file: SourceFile) -> None:
    """Before gigabytes of it are hashed."""
    if file.packing or file.kind in _BINARY_KINDS:
        return
    found = foreign_format(block[:HEAD_BYTES])
    if found is not None and found.packed:
        raise DataError(f"the file is {found.what}", field="data", value=file.path, bound="plain UTF-8 files", remedy=found.remedy)


def read_units(file: Readable, data: DataSection, rules: int, start: Start | None = None) -> Iterator[tuple[int, Read]]:
    """(bytes gone through, what they hold) in order: a unit, a bad row, or None for a blank line or a blank file. `start`: JSONL alone.

    Raises:
        DataError: the file cannot be read, is no text at all, or holds rows that must not be passed over.
    """
    try:
        stream = open_regular(file.path)
    except OSError as exc:
        raise DataError(
            f"the file cannot be read: {exc.strerror}", field="data", value=file.source.path, remedy="Check the file and its permissions"
        ) from exc
    with stream:
        try:
            if start is not None:
                stream.seek(start.offset_bytes)
                yield from _read_jsonl(stream, data, rules, start)
            else:
                yield from _read_packed(stream, file, data, rules) if file.source.packing else _read(stream, file, data, rules)
        except FileRefused as refused:
            raise DataError(
                f"{file.source.path}:{refused.line}: {refused.what}", field="data", bound=_due(file.source.kind), remedy=refused.remedy
            ) from refused


def reading_of(files: Iterable[SourceFile], data: DataSection) -> Reading | None:
    """How rows are read where the request names no field: by the first row that can be read. None where nothing has to be recognised.

    Raises:
        RequestError: the row can be read in several ways. DataError: a remote file cannot be read.
    """
    if not names_no_field(data):
        return None
    for file in files:
        if file.kind == "text":
            continue
        with open_source(file) as raw, suppress(FileRefused, *DAMAGED):  # whoever reads the file says so
            stream = unpacked(raw, file.packing)
            if file.kind == "jsonl":
                row = first_object(islice(stream, _FIRST_ROWS))
            else:
                rows = islice(table_rows(stream, file.kind, data), _FIRST_ROWS)
                row = next((row.content for row in rows if isinstance(row.content, dict)), None)
            if row is not None:
                return recognised(row)
    return None


def _due(kind: str) -> str:
    return "one JSON object a line" if kind == "jsonl" else f"a file of rows ({kind})"


def _read_packed(stream: BinaryIO, file: Readable, data: DataSection, rules: int) -> Iterator[tuple[int, Read]]:
    """What is in a compressed file; progress is counted in the bytes of the file itself."""
    inside, before = unpacked(stream, file.source.packing), 0
    try:
        for _, item in _read(inside, file, data, rules):
            now = stream.tell()
            yield now - before, item
            before = now
    except DAMAGED as exc:
        raise damaged(file.source.path, file.source.packing, exc) from exc


def _read(stream: Any, file: Readable, data: DataSection, rules: int) -> Iterator[tuple[int, Read]]:
    kind = file.source.kind
    if kind in _BINARY_KINDS:
        return _read_table(stream, file, data, rules)
    head = bytes(stream.peek(HEAD_BYTES)[:HEAD_BYTES])
    _refuse_compressed(head, file.source)
    wide = foreign_format(head) if rules > 1 else None
    if wide is not None and kind == "text":
        bad = BadRow(1, f"{wide.what}, not UTF-8; {wide.remedy[0].lower()}{wide.remedy[1:]}")
        return iter([(file.source.size_bytes, bad)])
    if wide is not None:
        raise DataError(f"the file is {wide.what}", field="data", value=file.source.path, bound="UTF-8", remedy=wide.remedy)
    if kind == "text":
        return _read_text(stream, file, data, rules)
    return _read_jsonl(stream, data, rules) if kind == "jsonl" else _read_table(stream, file, data, rules)


def _read_table(stream: BinaryIO, file: Readable, data: DataSection, rules: int) -> Iterator[tuple[int, Read]]:
    """Progress goes by the place in the file that was read to, which runs ahead of the rows."""
    before = 0
    for number, item in check_table(islice(table_rows(stream, file.source.kind, data), file.most_rows), data, rules):
        now = stream.tell() if not stream.closed else before
        size_bytes, before = max(0, now - before), max(now, before)
        yield from _units_of(number, size_bytes, item, data, rules)


def _read_jsonl(stream: BinaryIO, data: DataSection, rules: int, start: Start = _BEGINNING) -> Iterator[tuple[int, Read]]:
    for line, size_bytes, item in check_rows(stream, data, rules, start.line, start.offset_bytes):
        yield from _units_of(line, size_bytes, item, data, rules)


def _units_of(line: int, size_bytes: int, item: Document | BadRow | None, data: DataSection, rules: int) -> Iterator[tuple[int, Read]]:
    if not isinstance(item, Document):
        yield size_bytes, item
        return
    unit = Unit(item, _document_key(item), line)
    if item.prompt is not None or item.messages is not None:
        yield size_bytes, unit
    else:
        for number, part in enumerate(_parts(unit, iter([item.text]), data, rules)):
            yield (0 if number else size_bytes), part


def _read_text(stream: BinaryIO, file: Readable, data: DataSection, rules: int) -> Iterator[tuple[int, Read]]:
    """One file is one document. Checked to its end before any of it is used."""
    digest = hashlib.sha256() if file.source.packing else None
    found = _check_text(stream, rules, digest)
    if found is not True:
        yield file.source.size_bytes, found or None
        return
    stream.seek(0)
    unit = Unit(Document(), bytes.fromhex(file.sha256) if digest is None else digest.digest(), 1)
    yield 0, None
    for part in _parts(unit, _decoded(stream), data, rules):
        yield len(part.document.text), part


def _check_text(stream: BinaryIO, rules: int, digest: "hashlib._Hash | None") -> BadRow | bool:
    """True for text, False for nothing but white space. `digest` takes in what a packed file holds, its name as that of the plain one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, lines, has_text = 0, 0, False
    while block := stream.read(BLOCK_BYTES):
        if digest is not None:
            digest.update(block)
        if rules > 1 and b"\0" in block:
            at = block.index(b"\0")
            return BadRow(lines + block.count(b"\n", 0, at) + 1, f"not text: a NUL byte at byte offset {offset + at} of the file")
        waiting = len(decoder.getstate()[0])
        try:
            has_text = bool(decoder.decode(block).strip("\ufeff \t\r\n\f\v")) or has_text
        except UnicodeDecodeError as exc:
            return BadRow(lines + exc.object[: exc.start].count(b"\n") + 1, not_utf8(exc, offset - waiting))
        offset, lines = offset + len(block), lines + block.count(b"\n")
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as exc:
        return BadRow(lines + 1, not_utf8(exc, offset - len(exc.object)))
    return has_text


def _decoded(stream: BinaryIO) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    while block := stream.read(BLOCK_BYTES):
        yield decoder.decode(block)


def _parts(whole: Unit, texts: Iterator[str], data: DataSection, rules: int) -> Iterator[Unit]:
    """Cut a document into parts of a quarter of a million characters, each with a name of its own where each gives rows of its own.

    The first rules kept the beginning alone of a document that gives one row, as long as no token can be.
    """
    if rules == 1 and data.long_documents != "chunk":
        limit_chars = (data.sequence_length + 2) * TOKEN_CHARS
        yield replace(whole, document=Document(_first_chars(texts, limit_chars)))
        return
    numbered = data.long_documents == "chunk"
    waiting, number = "", 0
    for text in texts:
        *ready, waiting = pieces(waiting + text, PART_CHARS) if waiting or text else [""]
        for part in ready:
            yield _part(whole, part, number if numbered else None, first=number == 0, last=False)
            number += 1
    yield _part(whole, waiting, number if numbered else None, first=number == 0, last=True)


def _part(whole: Unit, text: str, number: int | None, *, first: bool, last: bool) -> Unit:
    key = whole.key if number is None else whole.key + number.to_bytes(8, "little")
    return Unit(Document(text), key, whole.line, first=first, last=last)


def _first_chars(texts: Iterator[str], limit_chars: int) -> str:
    kept, total = [], 0
    for text in texts:
        kept.append(text[: limit_chars - total])
        total += len(kept[-1])
        if total >= limit_chars:
            break
    return "".join(kept)


def _document_key(document: Document) -> bytes:
    content = (
        document.text
        if document.prompt is None and document.messages is None
        else json.dumps([document.prompt, document.text, document.messages, *([document.tools] if document.tools else [])])
    )
    return hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=16).digest()
