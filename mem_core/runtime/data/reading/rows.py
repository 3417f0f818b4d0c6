"""Row-by-row checking of JSONL: a line is a document, a bad row with its reason, or blank. Pure."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mem_core.domain.request import DataSection

GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_KINDS = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false", type(None): "null", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Document:
    """What one row gives to the tokenizer: text, or prompt and completion, or chat messages."""

    text: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """Why a row cannot be used. `line` counts physical lines from 1, blank ones included."""

    line: int
    reason: str


class _Bad(ValueError):
    """A reason on its way to `BadRow`."""


def check_rows(lines: Iterable[bytes], data: DataSection) -> Iterator[tuple[int, int, Document | BadRow | None]]:
    """(line number, bytes of the line, what it holds) for each physical line; None for a blank one."""
    offset = 0
    for number, line in enumerate(lines, start=1):
        body = line.removeprefix(_BOM) if number == 1 else line
        try:
            yield number, len(line), _document(body, offset + len(line) - len(body), data) if body.strip() else None
        except _Bad as bad:
            yield number, len(line), BadRow(number, str(bad))
        offset += len(line)


def _document(line: bytes, offset: int, data: DataSection) -> Document:
    row = _object(line, offset)
    if data.messages_field is not None:
        return Document(messages=_messages(row, data.messages_field))
    if data.prompt_field is not None and data.completion_field is not None:
        return Document(prompt=_text(row, data.prompt_field, blank_allowed=True), text=_text(row, data.completion_field))
    return Document(text=_text(row, data.text_field))


def _object(line: bytes, offset: int) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _Bad(not_utf8(exc, offset)) from exc
    try:
        row = json.loads(text)
    except json.JSONDecodeError as exc:
        if exc.msg == "Extra data":
            raise _Bad(f"two JSON values on one line (the second starts at column {exc.colno})") from exc
        cut = ", the line looks cut off" if exc.pos >= len(text.rstrip()) or exc.msg.startswith("Unterminated") else ""
        raise _Bad(f"not valid JSON: {exc.msg.removesuffix(' at')} at column {exc.colno}{cut}") from exc
    except (RecursionError, ValueError) as exc:
        raise _Bad(f"not usable JSON: {exc}") from exc
    if not isinstance(row, dict):
        raise _Bad(f"{_KINDS[type(row)]} where an object is due")
    return row


def not_utf8(exc: UnicodeDecodeError, offset: int) -> str:
    """The reason for bytes that are not UTF-8, with the offset in the file."""
    return f"not UTF-8: byte 0x{exc.object[exc.start]:02x} at byte offset {offset + exc.start} of the file"


def _text(row: dict[str, Any], field: str, blank_allowed: bool = False) -> str:
    if field not in row:
        raise _Bad(f"field '{field}' is missing; the row has {_names(row)}")
    value = row[field]
    if not isinstance(value, str):
        raise _Bad(f"field '{field}' is {_KINDS[type(value)]}, not a string")
    if not value.strip() and not blank_allowed:
        raise _Bad(f"field '{field}' is {'blank' if value else 'empty'}")
    return _encodable(value, field)


def _encodable(value: str, field: str) -> str:
    if value.isascii():
        return value
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise _Bad(f"field '{field}' holds half a surrogate pair at character {exc.start}") from exc
    return value


def _messages(row: dict[str, Any], field: str) -> list[dict[str, Any]]:
    messages = row.get(field)
    if field not in row:
        raise _Bad(f"field '{field}' is missing; the row has {_names(row)}")
    if not isinstance(messages, list) or not messages:
        raise _Bad(f"field '{field}' is {'an empty list' if messages == [] else _KINDS[type(messages)]}, not a list of messages")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise _Bad(f"message {position} of '{field}' needs a role and a content that are strings")
        _encodable(message["content"], field)
    return messages


def _names(row: dict[str, Any]) -> str:
    shown = ", ".join(f"'{name[:40]}'" for name in list(row)[:8])
    return f"the fields {shown}" if row else "no fields"
