"""Row checks: each kind of bad row, with its physical line and reason (field reports 124, 126, 128)."""

import pytest

from mem_core.domain.request import DataSection
from mem_core.runtime.data.reading.rows import BadRow, Document, check_rows

TEXT = DataSection()
PAIR = DataSection(prompt_field="prompt", completion_field="completion")
CHAT = DataSection(messages_field="messages")


def check(raw: bytes, data: DataSection = TEXT) -> list[Document | BadRow | None]:
    return [item for _, _, item in check_rows(raw.splitlines(keepends=True), data)]


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
    (CHAT, b'{"messages": [{"role": "user"}]}', "message 0 of 'messages' needs a role and a content"),
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
