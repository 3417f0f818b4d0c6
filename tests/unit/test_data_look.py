"""The doctor's look at the data: the real reader and encoder over the first rows, and preparation's own words for what it refuses."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.doctor.storage import data_findings
from mem_core.domain.environment import DataNumbers, Finding
from mem_core.domain.errors import MemError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.child import NoAnswer
from mem_core.runtime.data.encoding.prepare import prepare_data
from mem_core.runtime.data.look.first_look import look_at_data
from mem_core.runtime.data.look.heads import TOTAL_BYTES, read_heads
from mem_core.runtime.data.reading.sources import resolve_files
from mem_core.runtime.data.values import PreparedData
from mem_core.testing.tokenizer_folders import byte_level_bpe, llama_2_form, tokenizer_folder

NANO = "preset:llama-nano"
UNMARKED = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
TURNS = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
SHAREGPT = [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer"}]
PAIRS = {"prompt_field": "prompt", "completion_field": "completion"}


def look(source: str = NANO, vocab_size: int | None = None, cache: Path | None = None, **data: Any) -> DataNumbers:
    raw = {**data, "train": [str(path) for path in data["train"]]}
    return look_at_data(DataSection.model_validate(raw), source, vocab_size, cache)


def failure(numbers: DataNumbers) -> Finding | None:
    return next((finding for finding in data_findings(numbers) if finding.severity == "failure"), None)


def said(numbers: DataNumbers) -> dict[str, str]:
    return {finding.check: finding.observed for finding in data_findings(numbers)}


def prepared(data: DataSection, tmp_path: Path, source: str = NANO, vocab_size: int | None = None) -> PreparedData | MemError:
    try:
        return prepare_data(data, 0, source, vocab_size, tmp_path / "cache")
    except MemError as error:
        return error


def rows(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


ODD = [
    ("plain.txt", b"plain text that is long enough\n", {}, None),
    ("marked.txt", b"\xef\xbb\xbfwith a mark, and long enough\n", {}, None),
    ("wide.txt", "z\u00fcrich ".encode() * 60_000, {}, None),
    ("latin.txt", b"a\nb\x92c\n", {}, "latin.txt:2: not UTF-8: byte 0x92 at byte offset 3"),
    ("nul.txt", b"a\0b and more", {}, "nul.txt:1: not text: a NUL byte at byte offset 1"),
    ("packed.jsonl", gzip.compress(b"{}"), {}, "packed.jsonl:1: field 'text' is missing; the row has no fields"),
    ("packed.zst", b"\x28\xb5\x2f\xfd" + bytes(40), {}, "the zstd file cannot be unpacked"),
    ("packed.xz", b"\xfd7zXZ\x00" + bytes(40), {}, "the xz file cannot be unpacked"),
    ("utf16.jsonl", '{"text": "some text"}\n'.encode("utf-16"), {}, "the file is UTF-16 text"),
    ("utf16.txt", "some text\n".encode("utf-16"), {}, "utf16.txt:1: UTF-16 text, not UTF-8; convert it: iconv"),
    ("zip.jsonl", b"PK\x03\x04" + bytes(40), {}, "the file is a zip archive"),
    ("array.json", json.dumps([{"text": "long enough"}] * 3, indent=2).encode(), {}, None),
    ("array.jsonl", json.dumps([{"text": "a"}] * 3, indent=2).encode(), {"format": "jsonl"}, "array.jsonl:1: one JSON array"),
    ("cr.jsonl", rows(*[{"text": "some text"}] * 50).replace(b"\n", b"\r"), {}, "cr.jsonl:1: 50 rows in one line"),
    ("blank.jsonl", b"\n\n" + rows({"text": "some text that is long enough"}), {}, None),
    ("cut.jsonl", b'{"text": "a"', {}, "cut.jsonl:1: not valid JSON"),
    ("list.jsonl", b"[]\n", {}, "list.jsonl:1: a list where an object is due"),
    ("first.jsonl", b"id,text\n" + rows({"text": "fine and long enough"}), {}, "first.jsonl:1: not valid JSON"),
    ("skipped.jsonl", b"id,text\n" + rows({"text": "fine and long enough"}), {"on_bad_row": "skip"}, None),
    ("empty.jsonl", b"", {}, "empty"),
    ("onlyblank.jsonl", b"\n \n", {}, "no row to train on"),
    ("long.jsonl", rows({"text": "x" * 400_000}), {}, None),
    ("alpaca.jsonl", rows({"instruction": "i", "input": "", "output": "o"}), {}, None),
    ("sharegpt.jsonl", rows({"conversations": SHAREGPT}), {}, "the byte tokenizer of presets has no chat template"),
    ("sharegpt2.jsonl", rows({"conversations": SHAREGPT}), {"text_field": "conversations"}, "is a list, not a string"),
    ("dpo.jsonl", rows({"prompt": "p", "chosen": "c", "rejected": "r"}), {}, "the row has the fields 'prompt', 'chosen', 'rejected'"),
    ("chat.jsonl", rows({"messages": TURNS}), {}, "the byte tokenizer of presets has no chat template"),
    ("pairs.jsonl", rows({"prompt": "p", "completion": "c"}), {}, None),
    ("both.jsonl", rows({"prompt": "p", "completion": "c", "answer": "a"}), {}, "the rows can be read in several ways"),
    ("right.jsonl", rows({"prompt": "2+2=", "completion": "4"}), PAIRS, None),
    ("body.jsonl", rows({"body": "some text that is long enough"}), {"text_field": "body"}, None),
    ("long_prompt.jsonl", rows({"prompt": "p" * 500, "completion": "c"}), {**PAIRS, "sequence_length": 64}, None),
    ("refused.jsonl", rows({"text": "x" * 500}), {"long_documents": "refuse"}, "longer than data.sequence_length"),
    ("as_text.txt", rows({"text": "a"}), {"format": "text", **PAIRS}, "data.format: text has none"),
    ("table.parquet", b"PAR1" + bytes(20), {"format": "jsonl"}, "the file is a Parquet file"),
]


@pytest.mark.parametrize(("name", "content", "settings", "problem"), ODD, ids=[row[0] for row in ODD])
def test_the_doctors_answer_is_preparations_answer(
    tmp_path: Path, name: str, content: bytes, settings: dict[str, Any], problem: str | None
) -> None:
    """The same exit code and the same words, for everything that can be known from the first rows."""
    (tmp_path / name).write_bytes(content)
    data = DataSection.model_validate({"train": [str(tmp_path / name)], "validation": None, **settings})
    found, answer = failure(look_at_data(data, NANO)), prepared(data, tmp_path)
    if problem is None:
        assert (found, isinstance(answer, PreparedData)) == (None, True)
        return
    assert found is not None
    assert isinstance(answer, MemError)
    assert (found.exit_code, problem in found.observed, problem in str(answer)) == (answer.exit_code, True, True)
    if found.check == "data.rows":
        assert found.remedy == answer.remedy


def test_the_setting_that_fits_is_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows({"instruction": "i", "input": "", "output": "o"}))
    found = failure(look(train=[tmp_path / "a.jsonl"], text_field="body"))
    assert found is not None
    assert found.remedy == (
        "These are Alpaca rows: set data.prompt_field to instruction and data.completion_field to output, and data.context_field to input"
    )


def test_rows_after_the_first_ones_are_left_to_preparation(tmp_path: Path) -> None:
    """A look ends after a part of a large file: nothing is refused for what it has not seen, and its counts say of what they are."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"[]\n" + rows({"text": "x" * 1_000}) * 6_000 + b"[]\n" * 200)
    numbers = look(train=[path], on_bad_row="skip")
    assert failure(numbers) is None
    assert said(numbers)["data.bad_rows"].startswith("of the first 259 rows: 1 bad row was skipped, first ")
    none_yet = look(train=[path], on_bad_row="skip", max_bad_rows=0)
    assert failure(none_yet) is not None


def test_both_lists_are_looked_at_and_every_problem_names_its_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello, this is text")
    (tmp_path / "empty.txt").write_text("")
    numbers = look(train=[tmp_path / "*.txt"], validation=[str(tmp_path / "gone.txt")])
    assert [file.size_bytes for file in numbers.files] == [19, 0]
    assert len(numbers.problems) == 1
    assert "data.validation" in numbers.problems[0]
    assert "gone.txt" in numbers.problems[0]


def test_names_that_come_again_and_rows_read_as_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(rows({"text": "some text that is long enough"}))
    found = said(look(train=[path, tmp_path / "a*"]))
    assert "a.log is read as plain text because of its name" in found["data.format"]
    assert "count once" in found["data.names"]
    assert "data.format" not in said(look(train=[path], format="text"))


def test_the_standard_library_is_looked_at_within_the_bound() -> None:
    data = DataSection()
    numbers = look_at_data(data, NANO)
    assert (len(numbers.files) > 100, numbers.refusal, numbers.remarks) == (True, None, ())
    heads = read_heads(resolve_files(data.train, data, "data.train"), data)
    assert sum(len(head.content) for head in heads) <= TOTAL_BYTES


def test_remote_files_are_looked_at_by_their_beginning() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe({"/mem-look/a.jsonl": rows({"prompt": "p", "completion": "c"})})
    try:
        numbers = look(train=["memory://mem-look/a.jsonl"])
        assert failure(numbers) is None
        assert "data.prompt_field: prompt" in said(numbers)["data.columns"]
        found = failure(look(train=["memory://mem-look/a.jsonl"], text_field="body"))
        assert found is not None
        assert "set data.prompt_field to prompt" in found.remedy
    finally:
        fs.rm("/mem-look", recursive=True)


def test_a_folders_own_tokenizer_is_tried_in_a_process_of_its_own(tmp_path: Path) -> None:
    """What the loss of chats covers, a class that disagrees, ids beyond the embeddings, a broken file: each in its words."""
    chat = tmp_path / "chat.jsonl"
    chat.write_bytes(rows({"messages": TURNS}))
    folder = tokenizer_folder(tmp_path / "llama", llama_2_form(), chat_template=UNMARKED)
    numbers = look(str(folder), train=[chat], messages_field="messages", validation=None)
    assert failure(numbers) is None
    found = {finding.check: finding for finding in data_findings(numbers)}
    assert found["data.loss"].severity == "notice"
    assert "the loss covers the assistant's words and end-of-turn tokens: " in found["data.loss"].observed
    whole = look(str(folder), train=[chat], messages_field="messages", assistant_only=False, validation=None)
    (loss,) = [finding for finding in data_findings(whole) if finding.check == "data.loss"]
    assert (loss.severity, loss.observed.startswith("the loss covers whole conversations")) == ("warning", True)
    assert "data.assistant_only" in loss.remedy
    small = failure(look(str(folder), vocab_size=300, train=[chat], messages_field="messages"))
    assert small is not None
    assert (small.exit_code, "the model has 300 embeddings" in small.observed) == (64, True)
    qwen = tokenizer_folder(tmp_path / "qwen", byte_level_bpe(), "qwen2")
    (tmp_path / "a.txt").write_text("some text")
    assert "Qwen2Tokenizer is what counts" in said(look(str(qwen), train=[tmp_path / "a.txt"]))["tokenizer.class"]
    (qwen / "tokenizer.json").write_text("{")
    broken = failure(look(str(qwen), train=[tmp_path / "a.txt"]))
    assert broken is not None
    assert (broken.exit_code, "the tokenizer cannot be loaded" in broken.observed) == (64, True)


def nobody(*arguments: Any, **options: Any) -> Any:
    raise AssertionError(f"a process was asked: {arguments}, {options}")


def test_what_was_prepared_before_is_told_without_a_process(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_bytes(rows({"messages": TURNS}))
    folder = tokenizer_folder(tmp_path / "llama", llama_2_form(), chat_template=UNMARKED)
    data = DataSection(train=(str(chat),), messages_field="messages", validation=None)
    first = prepared(data, tmp_path, str(folder))
    assert isinstance(first, PreparedData)
    assert look_at_data(data, str(folder), None, tmp_path / "cache", ask=nobody).remarks == first.remarks != ()


def test_a_start_that_looks_twice_asks_once(tmp_path: Path) -> None:
    """And again as soon as a file or the tokenizer is another one."""
    path, folder = tmp_path / "a.txt", tokenizer_folder(tmp_path / "model", llama_2_form())
    path.write_text("some text")
    asked: list[str] = []

    def ask(program: str, job: str, limit_s: float) -> Any:
        asked.append(program)
        return {}

    def look_now() -> None:
        look_at_data(DataSection(train=(str(path),)), str(folder), ask=ask)

    look_now()
    look_now()
    assert len(asked) == 1
    path.write_text("some other text")
    look_now()
    (folder / "vocab.json").write_text("{}")
    look_now()
    assert len(asked) == 3


def test_a_tokenizer_that_does_not_answer_is_a_warning(tmp_path: Path) -> None:
    def ask(program: str, job: str, limit_s: float) -> Any:
        raise NoAnswer

    (tmp_path / "a.txt").write_text("some text")
    folder = tokenizer_folder(tmp_path / "model", llama_2_form())
    numbers = look_at_data(DataSection(train=(str(tmp_path / "a.txt"),)), str(folder), ask=ask)
    assert (failure(numbers), "did not answer within 120 s" in said(numbers)["data.rows"]) == (None, True)


def test_a_look_imports_nothing_heavy_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows({"text": "some text"}))
    code = (
        "import sys\nfrom pathlib import Path\nfrom mem_core.domain.request import DataSection\n"
        "from mem_core.runtime.data.look.first_look import look_at_data\n"
        "numbers = look_at_data(DataSection(train=(sys.argv[1],)), 'preset:llama-nano', 384, Path(sys.argv[2]))\n"
        "assert numbers.refusal is None\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'fsspec') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.jsonl"), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
