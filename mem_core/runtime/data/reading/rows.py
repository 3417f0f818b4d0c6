"""Row-by-row checking of JSONL: a line is a document, a bad row with its reason, or blank. Pure."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mem_core.domain.request import DataSection
from mem_core.runtime.data.reading.hints import fitting_setting
from mem_core.runtime.data.reading.messages import Message, read_messages, read_tools, standard_messages
from mem_core.runtime.data.reading.refused import FileRefused, RowRefused, kind_name
from mem_core.runtime.data.reading.tables import Row
from mem_core.runtime.models.encoding import CURRENT_RULES

_BOM = b"\xef\xbb\xbf"
_CHAT_EXTRAS = ("tools", "functions", "documents")
_UNSUPPORTED = "Leave the rows with {} out, or render them yourself and give them as prompt and completion"


@dataclass(frozen=True, slots=True)
class Document:
    """What one row gives to the tokenizer: text, or prompt and completion, or chat messages, of which the first `num_prompt_messages`
    are a prompt."""

    text: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    num_prompt_messages: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """Why a row cannot be used. `line` counts physical lines from 1, blank ones included."""

    line: int
    reason: str
    hint: str = ""  # the setting that would fit the row, where it is a known kind of row


def check_rows(
    lines: Iterable[bytes], data: DataSection, rules: int = CURRENT_RULES, lines_before: int = 0, bytes_before: int = 0
) -> Iterator[tuple[int, int, Document | BadRow | None]]:
    """(line number, bytes of the line, what it holds) for each physical line; None for a blank one.

    Raises:
        FileRefused: these are no rows, or rows of a kind that is not supported yet.
    """
    offset, is_first = bytes_before, not lines_before
    for number, line in enumerate(lines, start=lines_before + 1):
        body = line.removeprefix(_BOM) if number == 1 else line
        if rules > 1 and is_first and body.strip():
            _refuse_document(body.strip(), number)
            is_first = False
        try:
            yield number, len(line), _document(body, offset + len(line) - len(body), data, number, rules) if body.strip() else None
        except RowRefused as bad:
            if rules > 1:
                _refuse_carriage_returns(body, number)
            yield number, len(line), BadRow(number, str(bad), bad.hint)
        offset += len(line)


def check_table(rows: Iterable[Row], data: DataSection, rules: int) -> Iterator[tuple[int, Document | BadRow]]:
    """(row number, what it holds) for each row of a file that is no lines.

    Raises:
        FileRefused: rows of a kind that is not supported yet.
    """
    for row in rows:
        try:
            if isinstance(row.content, RowRefused):
                raise row.content
            yield row.number, _document_of(row.content, data, row.number, rules)
        except RowRefused as bad:
            yield row.number, BadRow(row.number, str(bad), bad.hint)


def first_object(lines: Iterable[bytes]) -> dict[str, Any] | None:
    """The first of the lines that is an object."""
    for number, line in enumerate(lines):
        with suppress(RowRefused):
            return _object(line.removeprefix(_BOM) if number == 0 else line, 0)
    return None


def _refuse_document(first_line: bytes, number: int) -> None:
    """A file may hold one JSON document over many lines, or all its rows in one array."""
    if first_line == b"{":
        raise FileRefused(number, "JSON in several lines, where one object a line is due", "Write one object a line: jq -c . old > new")
    if first_line[:1] == b"[" and (first_line[1:].strip() in (b"", b"{") or _is_array_of_objects(first_line)):
        raise FileRefused(number, "one JSON array, where one object a line is due", "Write one object a line: jq -c '.[]' old > new")


def _is_array_of_objects(line: bytes) -> bool:
    try:
        rows = json.loads(line)
    except (ValueError, RecursionError):
        return line[1:].lstrip().startswith(b"{")
    return isinstance(rows, list) and any(isinstance(row, dict) for row in rows)


def _refuse_carriage_returns(line: bytes, number: int) -> None:
    """Lines that end as on old Macs come as one: what looks like one bad row is all of them."""
    pieces = [piece for piece in line.split(b"\r") if piece.strip()]
    if len(pieces) < 2:
        return
    try:
        is_row = isinstance(json.loads(pieces[0]), dict)
    except (ValueError, RecursionError):
        return
    if is_row:
        raise FileRefused(
            number,
            f"{len(pieces)} rows in one line: lines end with a lone carriage return",
            "Convert the line ends: tr '\\r' '\\n' < old > new",
        )


def _document(line: bytes, offset: int, data: DataSection, number: int, rules: int) -> Document:
    return _document_of(_object(line, offset), data, number, rules)


def _document_of(row: dict[str, Any], data: DataSection, number: int, rules: int) -> Document:
    if data.messages_field is not None and rules > 2:
        return _chat(row, data.messages_field, number, rules)
    if data.messages_field is not None:
        if rules > 1:
            _refuse_unsupported(row, data.messages_field, number)
        return Document(messages=_messages(row, data.messages_field))
    if data.prompt_field is not None and data.completion_field is not None:
        if rules > 2 and any(isinstance(row.get(name), list) for name in (data.prompt_field, data.completion_field)):
            return _answered_chat(row, data.prompt_field, data.completion_field, number, rules)
        prompt = _text(row, data.prompt_field, blank_allowed=True)
        return Document(prompt=_with_context(prompt, row, data.context_field), text=_text(row, data.completion_field))
    return Document(text=_text(row, data.text_field))


def _with_context(prompt: str, row: dict[str, Any], field: str | None) -> str:
    """The prompt and, after an empty line, what else the row gives to it; rows without any are as good as others."""
    if field is None or row.get(field) in (None, ""):
        return prompt
    return with_context(prompt, _text(row, field, blank_allowed=True))


def with_context(prompt: str, context: str) -> str:
    """A prompt and what else is given to it, as training and answering see them."""
    return f"{prompt}\n\n{context}" if context.strip() else prompt


def _chat(row: dict[str, Any], field: str, number: int, rules: int) -> Document:
    return Document(messages=_listed(row, field, number, rules), tools=read_tools(row, number))


def _answered_chat(row: dict[str, Any], prompt: str, completion: str, number: int, rules: int) -> Document:
    """Prompt and completion as messages: one conversation, of which the prompt is the beginning."""
    before, after = (_listed(row, name, number, rules) for name in (prompt, completion))
    return Document(messages=[*before, *after], tools=read_tools(row, number), num_prompt_messages=len(before))


def _listed(row: dict[str, Any], field: str, number: int, rules: int) -> list[Message]:
    if field not in row:
        raise RowRefused(f"field '{field}' is missing; the row has {_names(row)}", fitting_setting(row))
    messages = standard_messages(row[field]) if rules > 3 else row[field]
    return read_messages(messages, field, number, fitting_setting(row))


def _refuse_unsupported(row: dict[str, Any], field: str, number: int) -> None:
    """What a chat row could not hold beside words for runs of the second rules."""
    for name in _CHAT_EXTRAS:
        if row.get(name):
            raise FileRefused(number, f"the chat comes with '{name}', which is not supported yet", _UNSUPPORTED.format(f"'{name}'"))
    messages = row.get(field)
    for position, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else ""
        if isinstance(content, list):
            what = f"the content of message {position} is a list of parts, which is not supported yet"
            raise FileRefused(number, what, _UNSUPPORTED.format("content in parts"))
        if content is None and isinstance(message, dict) and (message.get("tool_calls") or message.get("function_call")):
            what = f"message {position} calls tools and has no content, which is not supported yet"
            raise FileRefused(number, what, _UNSUPPORTED.format("such messages"))


def _object(line: bytes, offset: int) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise RowRefused(not_utf8(exc, offset)) from exc
    try:
        row = json.loads(text)
    except json.JSONDecodeError as exc:
        if exc.msg == "Extra data":
            raise RowRefused(f"two JSON values on one line (the second starts at column {exc.colno})") from exc
        cut = ", the line looks cut off" if exc.pos >= len(text.rstrip()) or exc.msg.startswith("Unterminated") else ""
        raise RowRefused(f"not valid JSON: {exc.msg.removesuffix(' at')} at column {exc.colno}{cut}") from exc
    except (RecursionError, ValueError) as exc:
        raise RowRefused(f"not usable JSON: {exc}") from exc
    if not isinstance(row, dict):
        raise RowRefused(f"{kind_name(row)} where an object is due")
    return row


def not_utf8(exc: UnicodeDecodeError, offset: int) -> str:
    """The reason for bytes that are not UTF-8, with the offset in the file."""
    return f"not UTF-8: byte 0x{exc.object[exc.start]:02x} at byte offset {offset + exc.start} of the file"


def _text(row: dict[str, Any], field: str, blank_allowed: bool = False) -> str:
    if field not in row:
        raise RowRefused(f"field '{field}' is missing; the row has {_names(row)}", fitting_setting(row))
    value = row[field]
    if not isinstance(value, str):
        raise RowRefused(f"field '{field}' is {kind_name(value)}, not a string")
    if not value.strip() and not blank_allowed:
        raise RowRefused(f"field '{field}' is {'blank' if value else 'empty'}")
    return _encodable(value, field)


def _encodable(value: str, field: str) -> str:
    if value.isascii():
        return value
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise RowRefused(f"field '{field}' holds half a surrogate pair at character {exc.start}") from exc
    return value


def _messages(row: dict[str, Any], field: str) -> list[dict[str, Any]]:
    messages = row.get(field)
    if field not in row:
        raise RowRefused(f"field '{field}' is missing; the row has {_names(row)}", fitting_setting(row))
    if not isinstance(messages, list) or not messages:
        raise RowRefused(f"field '{field}' is {'an empty list' if messages == [] else kind_name(messages)}, not a list of messages")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise RowRefused(f"message {position} of '{field}' needs a role and a content that are strings", fitting_setting(row))
        _encodable(message["content"], field)
    return messages


def _names(row: dict[str, Any]) -> str:
    shown = ", ".join(f"'{name[:40]}'" for name in list(row)[:8])
    return f"the fields {shown}" if row else "no fields"
