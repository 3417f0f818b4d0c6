"""A first look at data files: what is not text or not JSONL is named before anything is tokenised."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.data.reading.sniff import sniff_data, sniff_file


@pytest.mark.parametrize(
    ("content", "kind", "part"),
    [
        (b"plain text\n", "text", ""),
        (b"", "text", ""),
        (b"\xef\xbb\xbfwith a mark\n", "text", ""),
        ("z\u00fcrich ".encode() * 20_000, "text", ""),
        (b"a\nb\x92c\n", "text", "line 2"),
        (b"a\0b", "text", "NUL"),
        (gzip.compress(b"{}"), "jsonl", "gzip"),
        (b'\n\n{"text": "a"}\n', "jsonl", ""),
        (b'{"text": "a"', "jsonl", "line 1 is not JSON"),
        (b"[]\n", "jsonl", "not an object"),
        (b"null\n", "jsonl", "not an object"),
        (b'{"text": "' + b"x" * 200_000 + b'"}\n', "jsonl", ""),
    ],
)
def test_the_first_bytes_tell(tmp_path: Path, content: bytes, kind: str, part: str) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    problem = sniff_file(str(path), kind)
    assert part in problem
    assert bool(problem) == bool(part)


def test_a_missing_file_is_a_problem_and_not_an_exception(tmp_path: Path) -> None:
    assert sniff_file(str(tmp_path / "gone"), "text") == "No such file or directory"


def sniff(**data: Any) -> Any:
    return sniff_data(RuntimeRequest(run_id="demo", data=data))


def test_both_lists_are_looked_at_and_every_problem_names_its_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "empty.txt").write_text("")
    seen = sniff(train=[str(tmp_path / "*.txt")], validation=[str(tmp_path / "gone.txt")])
    assert [file.size_bytes for file in seen.files] == [5, 0]
    assert len(seen.problems) == 1
    assert "data.validation" in seen.problems[0]
    assert "gone.txt" in seen.problems[0]


def test_the_standard_library_is_always_there() -> None:
    seen = sniff(train=["stdlib:"])
    assert len(seen.files) > 100
    assert not [file for file in seen.files if file.problem]
