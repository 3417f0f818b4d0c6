"""Row checks: each kind of bad row, with its physical line and reason (field reports 124, 126, 128)."""

import io
import json
from typing import Any

import pytest

from mem_core.domain.request import DataSection
from mem_core.runtime.data.reading.formats import foreign_format
from mem_core.runtime.data.reading.rows import BadRow, Document, FileRefused, check_rows

TEXT = DataSection()
PAIR = DataSection(prompt_field="prompt", completion_field="completion")
CHAT = DataSection(messages_field="messages")


def check(raw: bytes, data: DataSection = TEXT) -> list[Document | BadRow | None]:
    return [item for _, _, item in check_rows(io.BytesIO(raw), data)]


REASONS = [
    (TEXT, b'{"text": "cut of', "the line looks cut off"),
    (TEXT, b'{"text": "a"', "the line looks cut off"),
    (TEXT, b"not json", "not valid JSON: Expecting value at column 1"),
    (TEXT, b"[]", "a list where an object is due"),
    (TEXT, b"7", "a number where an object is due"),
    (TEXT, b'"text"', "a string where an object is due"),
    (TEXT, b"null", "null where an object is due"),
    (TEXT, b'{"text": "a"} {"text": "b"}', "two JSON values on one line (the second starts at column 15)"),
    (TEXT, b"{}", "field 'text' is missing; the row has no fields"),
    (TEXT, b'{"Text": "x"}', "field 'text' is missing; the row has the fields 'Text'"),
    (TEXT, b'{"text": null}', "field 'text' is null, not a string"),
    (TEXT, b'{"text": ["a"]}', "field 'text' is a list, not a string"),
    (TEXT, b'{"text": true}', "field 'text' is true or false, not a string"),
    (TEXT, b'{"text": ""}', "field 'text' is empty"),
    (TEXT, b'{"text": " \\n "}', "field 'text' is blank"),
    (TEXT, b'{"text": "it\x92s"}', "not UTF-8: byte 0x92 at byte offset 12 of the file"),
    (TEXT, b'{"text": "\\ud800"}', "field 'text' holds half a surrogate pair at character 0"),
    (TEXT, b'{"text": ' + b"[" * 100_000 + b"}", "not usable JSON: maximum recursion depth exceeded"),
    (TEXT, b'{"text": ' + b"1" * 5_000 + b"}", "not usable JSON: Exceeds the limit"),
    (PAIR, b'{"prompt": "a"}', "field 'completion' is missing; the row has the fields 'prompt'"),
    (PAIR, b'{"prompt": 1, "completion": "a"}', "field 'prompt' is a number, not a string"),
    (PAIR, b'{"prompt": "a", "completion": " "}', "field 'completion' is blank"),
    (CHAT, b'{"messages": []}', "field 'messages' is an empty list"),
    (CHAT, b'{"messages": "hi"}', "field 'messages' is a string, not a list of messages"),
    (CHAT, b'{"messages": [{"role": "user"}]}', "message 0 of 'messages' has no content and calls no tool"),
    (CHAT, b'{"text": "a"}', "field 'messages' is missing; the row has the fields 'text'"),
]


@pytest.mark.parametrize(("data", "line", "reason"), REASONS)
def test_a_bad_row_is_named_with_line_and_reason(data: DataSection, line: bytes, reason: str) -> None:
    (item,) = check(line + b"\n", data)
    assert isinstance(item, BadRow)
    assert item.line == 1
    assert reason in item.reason


def test_the_recipe_of_report_124() -> None:
    """100 rows with lines 7 (cut), 20 (a list), 33 (two objects), 50 (blank), 51 (null): physical numbers, blanks counted."""
    lines = [b'{"text": "row %d"}' % number for number in range(1, 101)]
    lines[6], lines[19], lines[32], lines[49], lines[50] = b'{"text": "ro', b"[]", b'{"text":"a"}{"text":"b"}', b"  ", b"null"
    found = check(b"\n".join(lines))
    assert [item.line for item in found if isinstance(item, BadRow)] == [7, 20, 33, 51]
    assert [number for number, item in enumerate(found, 1) if item is None] == [50]
    assert sum(isinstance(item, Document) for item in found) == 95


def test_byte_offsets_count_from_the_start_of_the_file() -> None:
    first = b'{"text": "fine"}\n'
    _, bad = check(first + b'{"text": "\x92"}\n')
    assert isinstance(bad, BadRow)
    assert f"byte offset {len(first) + 10} of" in bad.reason
    marked = b"\xef\xbb\xbf" + b'{"text": "\x92"}\n'
    (bad,) = check(marked)
    assert isinstance(bad, BadRow)
    assert "byte offset 13 of" in bad.reason


def test_what_is_fine() -> None:
    """A byte order mark, Windows line ends, doubled keys, other fields, an empty prompt."""
    assert check(b'\xef\xbb\xbf{"text": "a"}\r\n{"x": 1, "text": "b", "text": "c"}') == [Document("a"), Document("c")]
    assert check(b'{"prompt": "", "completion": "b"}', PAIR) == [Document("b", prompt="")]
    messages = [{"role": "user", "content": "hi"}]
    assert check(b'{"messages": [{"role": "user", "content": "hi"}]}', CHAT) == [Document(messages=messages)]


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
CALLS = {"role": "assistant", "content": None, "tool_calls": [{}]}
WITH_IMAGE = {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image"}]}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
HINTS = [
    ({"instruction": "i", "input": "", "output": "o"}, "Alpaca rows: set data.prompt_field to instruction and data.completion_field to"),
    ({"instruction": "i", "input": "x", "output": "o"}, "and data.context_field to input"),
    ({"conversations": SHAREGPT}, "These are ShareGPT conversations: set data.messages_field to conversations"),
    ({"prompt": "p", "chosen": "c", "rejected": "r"}, "(DPO), which cannot be trained on as pairs yet: data.prompt_field: prompt with"),
    ({"chosen": TURNS, "rejected": TURNS}, "data.messages_field: chosen trains on the chosen ones alone"),
    ({"messages": TURNS}, "These are chats: set data.messages_field to messages"),
    ({"conversations": TURNS}, "These are chats: set data.messages_field to conversations"),
    ({"prompt": "p", "completion": "c"}, "set data.prompt_field to prompt and data.completion_field to completion"),
    ({"question": "p", "answer": "c"}, "set data.prompt_field to question and data.completion_field to answer"),
    ({"content": "some text", "id": 7}, "Their text stands in 'content': set data.text_field to it"),
    ({"Text": "some text"}, "set data.text_field to it"),
    ({"a": "x", "b": "y"}, ""),
    ({"id": 1}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("row", "hint"), HINTS)
def test_rows_of_a_known_kind_name_the_setting_that_fits(row: dict[str, object], hint: str) -> None:
    (item,) = check(json.dumps(row).encode())
    assert isinstance(item, BadRow)
    assert hint in item.hint
    assert bool(hint) == bool(item.hint)


def chat(messages: list[Any], **more: object) -> bytes:
    return json.dumps({"messages": messages, **more}).encode()


REFUSED = [
    (TEXT, b'[\n  {"text": "a"},\n  {"text": "b"}\n]\n', 1, "one JSON array, where one object a line is due"),
    (TEXT, b'[{"text": "a"}, {"text": "b"}]', 1, "one JSON array"),
    (TEXT, b'\n[{"text": "a"},\n{"text": "b"}]', 2, "one JSON array"),
    (TEXT, b'{\n  "text": "a"\n}\n', 1, "JSON in several lines"),
    (TEXT, b'{"text": "a"}\r{"text": "b"}\r{"text": "c"}\r', 1, "3 rows in one line: lines end with a lone carriage return"),
    (TEXT, b'{"text": "ok"}\n{"text": "a"}\r{"text": "b"}', 2, "2 rows in one line"),
    (CHAT, chat(TURNS, documents=[{"text": "f"}]), 1, "the chat comes with 'documents', which is not supported yet"),
    (CHAT, chat(TURNS, images=["a.png"]), 1, "the chat comes with 'images', which is not supported yet"),
    (CHAT, chat([{**TURNS[0], "function_call": {"name": "f"}}]), 1, "comes with 'function_call', which is not supported yet"),
    (CHAT, chat([WITH_IMAGE]), 1, "a part of message 0 of 'messages' is of type 'image', which is not supported yet"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "raw", "line", "what"), REFUSED)
@pytest.mark.parametrize("on_bad_row", ["fail", "skip"])
def test_what_no_count_of_bad_rows_would_tell_is_refused(data: DataSection, raw: bytes, line: int, what: str, on_bad_row: str) -> None:
    """Also where bad rows are skipped: fifty rows must not pass for one, nor a chat without its tools for a chat."""
    with pytest.raises(FileRefused) as caught:
        check(raw, data.model_copy(update={"on_bad_row": on_bad_row}))
    assert (caught.value.line, what in caught.value.what) == (line, True)
    assert all(isinstance(item, Document | BadRow | None) for _, _, item in check_rows(io.BytesIO(raw), data, 1))


def test_calls_tools_parts_and_prompts_as_messages_are_rows() -> None:
    tools, parts = [{"name": "f"}], {"role": "user", "content": [{"type": "text", "text": "q"}, "r"]}
    assert check(chat([parts, CALLS], tools=tools), CHAT) == [Document(messages=[parts, CALLS], tools=tools)]
    assert check(chat(TURNS, tools=json.dumps(tools)), CHAT) == [Document(messages=TURNS, tools=tools)]
    pair = json.dumps({"p": TURNS[:1], "c": TURNS[1:]}).encode()
    data = DataSection(prompt_field="p", completion_field="c")
    assert check(pair, data) == [Document(messages=TURNS, num_prompt_messages=1)]
    (mixed,) = check(json.dumps({"p": "q", "c": TURNS[1:]}).encode(), data)
    assert isinstance(mixed, BadRow)
    assert mixed.reason == "field 'p' is a string, not a list of messages"


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"train": "no"}, "train of message 0 of 'messages' must be true or false"),
        ({"weight": 0.5}, "weight of message 0 of 'messages' must be 0 or 1"),
        ({"train": True}, "message 0 of 'messages' is to be trained and not the assistant's, whose words alone can be"),
        ({"tool_calls": "f"}, "the tool_calls of message 0 of 'messages' are no list of calls"),
        ({"content": 3}, "the content of message 0 of 'messages' is neither text nor a list of parts"),
        ({"content": "\ud800"}, "message 0 of 'messages' holds half a surrogate pair"),
    ],
)
def test_what_a_message_says_of_itself_is_checked(turn: dict[str, Any], reason: str) -> None:
    (found,) = check(chat([{**TURNS[0], **turn}]), CHAT)
    assert isinstance(found, BadRow)
    assert found.reason == reason


@pytest.mark.parametrize("tools", [None, []])
def test_empty_tools_are_no_tools(tools: object) -> None:
    assert check(json.dumps({"messages": TURNS, "tools": tools}).encode(), CHAT) == [Document(messages=TURNS)]


def test_a_bad_first_line_is_a_bad_row_like_any_other() -> None:
    first, second = check(b'id,text\n{"text": "fine"}\n')
    assert isinstance(first, BadRow)
    assert second == Document("fine")


@pytest.mark.parametrize(
    ("head", "what"),
    [
        (b"\x28\xb5\x2f\xfd" + b"x" * 20, "zstd-compressed"),
        (b"\xfd7zXZ\x00" + b"x" * 20, "xz-compressed"),
        (b"\x1f\x8b\x08", "gzip-compressed"),
        (b"BZh91AY&SY", "bzip2-compressed"),
        (b"PK\x03\x04", "a zip archive"),
        (b"PAR1\x15\x04\x15\x00", "a Parquet file"),
        ("some text".encode("utf-16"), "UTF-16 text"),
        ('{"text": "größer"}'.encode("utf-16-le"), "UTF-16LE text"),
        ('{"text": "größer"}'.encode("utf-16-be"), "UTF-16BE text"),
        ("some text".encode("utf-32"), "UTF-32 text"),
        (b"a/b.txt" + bytes(250) + b"ustar", "a tar archive"),
    ],
)  # fmt: skip
def test_files_of_another_kind_are_called_by_name(head: bytes, what: str) -> None:
    found = foreign_format(head)
    assert found is not None
    assert found.what == what
    assert found.remedy


@pytest.mark.parametrize("text", ["", "a", "PAR1 for the course", "BZh is no word", "größer 漢字", '{"text": "a"}', "\ufeffmarked", "7z x"])
def test_text_is_no_other_kind(text: str) -> None:
    assert foreign_format(text.encode()) is None
