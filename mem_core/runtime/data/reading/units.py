"""Files to units of text: hashed, checked row by row, in bounded memory. A unit is a document, or a part of a very long one."""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.infrastructure.storage.reading import open_regular
from mem_core.runtime.data.reading.formats import HEAD_BYTES, foreign_format
from mem_core.runtime.data.reading.pieces import pieces
from mem_core.runtime.data.reading.rows import BadRow, Document, FileRefused, check_rows, not_utf8
from mem_core.runtime.data.reading.sources import SourceFile, open_source

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


@dataclass(frozen=True, slots=True)
class Unit:
    """Text that stays together when rows are held out. `first` and `last`: it begins and ends its document."""

    document: Document
    key: bytes
    line: int
    first: bool = True
    last: bool = True


Read = Unit | BadRow | None


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
    found = foreign_format(block[:HEAD_BYTES])
    if found is not None and found.packed:
        raise DataError(f"the file is {found.what}", field="data", value=file.path, bound="plain UTF-8 files", remedy=found.remedy)


def read_units(file: Readable, data: DataSection, rules: int) -> Iterator[tuple[int, Read]]:
    """(bytes gone through, what they hold) in order: a unit, a bad row, or None for a blank line or a blank file.

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
        head = stream.read(HEAD_BYTES)
        _refuse_compressed(head, file.source)
        stream.seek(0)
        wide = foreign_format(head) if rules > 1 else None
        if wide is not None and file.source.kind == "text":
            yield file.source.size_bytes, BadRow(1, f"{wide.what}, not UTF-8; {wide.remedy[0].lower()}{wide.remedy[1:]}")
            return
        if wide is not None:
            raise DataError(f"the file is {wide.what}", field="data", value=file.source.path, bound="UTF-8", remedy=wide.remedy)
        try:
            yield from _read_jsonl(stream, data, rules) if file.source.kind == "jsonl" else _read_text(stream, file, data, rules)
        except FileRefused as refused:
            raise DataError(
                f"{file.source.path}:{refused.line}: {refused.what}", field="data", bound="one JSON object a line", remedy=refused.remedy
            ) from refused


def _read_jsonl(stream: BinaryIO, data: DataSection, rules: int) -> Iterator[tuple[int, Read]]:
    for line, size_bytes, item in check_rows(stream, data, rules):
        if not isinstance(item, Document):
            yield size_bytes, item
            continue
        unit = Unit(item, _document_key(item), line)
        if item.prompt is not None or item.messages is not None:
            yield size_bytes, unit
        else:
            for number, part in enumerate(_parts(unit, iter([item.text]), data, rules)):
                yield (0 if number else size_bytes), part


def _read_text(stream: BinaryIO, file: Readable, data: DataSection, rules: int) -> Iterator[tuple[int, Read]]:
    """One file is one document. Checked to its end before any of it is used."""
    found = _check_text(stream, rules)
    if found is not True:
        yield file.source.size_bytes, found or None
        return
    stream.seek(0)
    unit = Unit(Document(), bytes.fromhex(file.sha256), 1)
    yield 0, None
    for part in _parts(unit, _decoded(stream), data, rules):
        yield len(part.document.text), part


def _check_text(stream: BinaryIO, rules: int) -> BadRow | bool:
    """True for text, False for nothing but white space."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, lines, has_text = 0, 0, False
    while block := stream.read(BLOCK_BYTES):
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
        else json.dumps([document.prompt, document.text, document.messages])
    )
    return hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=16).digest()
