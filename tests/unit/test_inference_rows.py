"""Rows of prompts: which field asks, what cannot be answered, and the folder that remembers answers."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.inference.recorded import Composed, DidNotFit
from mem_core.domain.errors import DataError, RequestError, RunHeld
from mem_core.runtime.inference.prompt_rows import Prompt, PromptRows
from mem_core.runtime.inference.work_folder import Answer, WorkFolder

CHAT = [{"role": "user", "content": "hello"}]


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "a"}, Prompt("a")),
        ({"text": "a", "prompt": "b"}, Prompt("a")),
        ({"instruction": "a", "input": "b", "id": 1}, Prompt("a\n\nb")),
        ({"question": "a", "context": " "}, Prompt("a")),
        ({"messages": CHAT, "source": "x"}, Prompt(messages=tuple(CHAT))),
        ({"prompt": CHAT}, Prompt(messages=tuple(CHAT))),
        ({"conversations": [{"from": "human", "value": "hello"}]}, Prompt(messages=tuple(CHAT))),
    ],
)
def test_the_field_that_asks_is_recognised(tmp_path: Path, row: dict[str, Any], asked: Prompt) -> None:
    assert list(PromptRows(written(tmp_path, row)).prompts()) == [asked]


def test_a_named_field_wins_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    rows = PromptRows(written(tmp_path, {"body": "a", "prompt": "b"}, "", {"body": "c"}), field="body")
    assert [prompt.text for prompt in rows.prompts()] == ["a", "c"]


def test_a_named_field_is_the_whole_prompt(tmp_path: Path) -> None:
    """As in training: what else a row gives to it counts where the field is recognised, and not where somebody has named it."""
    path = written(tmp_path, {"instruction": "a", "input": "b"})
    assert [list(PromptRows(path, field=field).prompts()) for field in (None, "instruction")] == [[Prompt("a\n\nb")], [Prompt("a")]]


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert list(PromptRows(tmp_path / "p.jsonl.gz").prompts()) == [Prompt("a")]


@pytest.mark.parametrize("row", [{"prompt": "a", "question": "b"}, {"body": "a"}])
def test_what_is_not_clear_is_asked(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="--prompt-field"):
        list(PromptRows(written(tmp_path, row)).prompts())


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": 3}, "line 2: field 'prompt' is a number"),
        ({"other": "a"}, "line 2: field 'prompt' is missing"),
        ({"prompt": "a", "completion": "b"}, "line 2: it has a field 'completion' already.*--prefix"),
        ({"prompt": [*CHAT, {"role": "assistant", "content": "x"}]}, "line 2: the last message of 'prompt' is the assistant's"),
        ("[1]", "line 2: a list where an object is due"),
        ('{"prompt"', "line 2 is no JSON"),
    ],
)
def test_rows_that_ask_nothing_are_named(tmp_path: Path, row: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        list(PromptRows(written(tmp_path, {"prompt": "a"}, row)).prompts())


def answer(row: int) -> Answer:
    return Answer(row=row, completion=f"é{row}\n", prompt_tokens=2, tokens=3, finish_reason="length")


@pytest.fixture
def work(tmp_path: Path) -> WorkFolder:
    folder = WorkFolder(tmp_path / "out.jsonl")
    folder.path.mkdir()
    folder.record(Composed(batch=0, rows=(2, 0), longest=4))
    folder.keep(0, [answer(2), answer(0)])
    folder.record(Composed(batch=1, rows=(1, 3), longest=3))
    return folder


def test_answers_are_found_again_in_any_order(work: WorkFolder) -> None:
    work.keep(1, [answer(1), answer(3)])
    again = WorkFolder(work.path.with_name("out.jsonl"))
    assert again.read().rows == {0, 1, 2, 3}
    assert list(again.answers(range(4))) == [answer(row) for row in range(4)]


def test_whatever_was_cut_in_the_middle_of_a_batch_is_not_believed(work: WorkFolder) -> None:
    """At every byte of it: nothing of the batch is there, and what is kept next stands right behind the one before."""
    path = work.path / "answers.jsonl"
    before = path.read_bytes()
    work.keep(1, [answer(1), answer(3)])
    whole = path.read_bytes()
    for size in range(len(before), len(whole)):
        path.write_bytes(whole[:size])
        record = work.read()
        assert (record.rows, record.pending and record.pending.batch) == ({2, 0}, 1)
        work.keep(1, [answer(1), answer(3)])
        assert path.read_bytes() == whole


def test_a_record_that_was_cut_is_cut_back(work: WorkFolder) -> None:
    path = work.path / "composed.jsonl"
    before = path.read_bytes()
    work.record(DidNotFit(batch=1, why="no room"))
    path.write_bytes(path.read_bytes()[:-5])
    assert work.read().pending is not None
    assert path.read_bytes() == before


def test_one_process_at_a_time_holds_it(work: WorkFolder) -> None:
    with work.held(), pytest.raises(RunHeld, match="another process"), WorkFolder(work.path.with_name("out.jsonl")).held(patience_s=0.0):
        raise AssertionError("two hold it")
    with work.held(patience_s=0.0) as descriptor:
        assert os.fstat(descriptor).st_size == 0
