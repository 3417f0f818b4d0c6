"""As what a file is read: what the request asks for decides, then its first bytes and its name. Pure."""

import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Literal, cast

from mem_core.domain.errors import RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.reading.packing import PACKED_SUFFIXES

Kind = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
Head = Callable[[], bytes]
DEFAULT_TEXT_FIELD = "text"
_BOM = b"\xef\xbb\xbf"
_BY_SUFFIX: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonlines": "jsonl", ".jl": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".arrow": "arrow", ".json": "json", ".txt": "text",
}  # fmt: skip
DATA_SUFFIXES = frozenset(_BY_SUFFIX)
_JSONL_SUFFIXES_UNTIL_3 = {".jsonl", ".ndjson", ".json"}


def row_fields(data: DataSection) -> list[str]:
    """The fields of rows that the request names."""
    return [name for name in ("messages_field", "prompt_field", "completion_field") if getattr(data, name) is not None]


def no_fields(what: str, data: DataSection) -> RequestError:
    """The refusal of a source without rows where rows are asked for."""
    return RequestError(
        f"data.{' and data.'.join(row_fields(data))} ask for rows with fields, and {what} has none",
        field="data",
        remedy="Give files with rows (JSONL, JSON, CSV, TSV, parquet, Arrow), or leave the fields out to train on plain text",
    )


def kind_of(path: str, data: DataSection, head: Head) -> Kind:
    """As what a file is read. `head` gives its first bytes, unpacked.

    Raises:
        RequestError: it is asked for as plain text, and for fields of rows.
    """
    if data.format != "auto":
        if data.format == "text" and row_fields(data):
            raise no_fields("data.format: text", data)
        return cast(Kind, data.format)
    begins = head()
    found = _by_content(begins) or _by_name(path)
    asks_for_rows = bool(row_fields(data))
    if found in ("csv", "tsv", "parquet", "arrow"):
        return found
    if found == "text" and not asks_for_rows and data.text_field == DEFAULT_TEXT_FIELD:
        return found
    named = "jsonl" if found in ("jsonl", "json") or asks_for_rows else "text"
    return _json_or_lines(begins.removeprefix(_BOM).lstrip()) or named


def plain_suffix(path: str) -> str:
    """The suffix of what is in a file: that before .gz or .zst, in small letters."""
    name = PurePosixPath(path)
    if name.suffix.lower() in PACKED_SUFFIXES:
        name = name.with_suffix("")
    return name.suffix.lower()


def _by_content(head: bytes) -> Kind | None:
    if head.startswith(b"PAR1") and b"\0" in head:
        return "parquet"
    # A stream of Arrow messages begins with a mark of four bytes and the length of a schema.
    return "arrow" if head.startswith((b"ARROW1\0\0", b"\xff\xff\xff\xff")) else None


def _by_name(path: str) -> Kind | None:
    suffix = plain_suffix(path)
    return _BY_SUFFIX.get(suffix) if suffix in _BY_SUFFIX else ("text" if suffix else None)


def _json_or_lines(head: bytes) -> Kind | None:
    """What text that begins so is, where it is JSON: rows in lines, or one array of them."""
    if head[:1] == b"[" and head[1:].lstrip()[:1] in (b"{", b""):
        return "json"
    if head[:1] != b"{":
        return None
    line, _, rest = head.partition(b"\n")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return None if rest else "jsonl"  # a first line that is longer than what was read
    return "jsonl"


def kind_until_3(path: str, data: DataSection, rules: int, head: Head) -> Kind:
    """The same for runs that were born under the first three rules, which knew text and JSONL alone.

    Raises:
        RequestError: as `kind_of`.
    """
    if rules > 1 and row_fields(data):
        if data.format == "text":
            raise no_fields("data.format: text", data)
        return "jsonl"
    if data.format != "auto":
        return cast(Kind, data.format)
    if PurePosixPath(path).suffix.lower() in _JSONL_SUFFIXES_UNTIL_3:
        return "jsonl"
    named = rules > 1 and data.text_field != DEFAULT_TEXT_FIELD
    return "jsonl" if named and head().removeprefix(_BOM).lstrip().startswith(b"{") else "text"
