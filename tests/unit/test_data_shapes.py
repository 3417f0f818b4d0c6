"""The same rows in every shape that people have them in give the same tokens; what a shape cannot hold is refused with its place."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard

from mem_core.domain.errors import DataError, RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.prepare import with_columns
from mem_core.runtime.data.encoding.tokenize_process import prepare_here, resolve_job
from mem_core.runtime.data.look.first_look import look_at_data
from mem_core.runtime.data.reading.kinds import Kind
from mem_core.runtime.data.reading.refused import FileRefused
from mem_core.runtime.data.reading.tables import BLOCK_BYTES, table_rows
from mem_core.runtime.data.values import PreparedData, PrepareJob
from mem_core.runtime.models.encoding import CURRENT_RULES

Row = dict[str, Any]
WORDS = ("naïve", "the", '"quoted"', "comma, here", "tab\there", "line\nbreak", "line\r\nbreak", "漢字", "\ufeff", "end\\", "{}", "[1]")


def texts(count: int = 300) -> list[Row]:
    rng = random.Random(7)
    return [{"text": "x " + " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))} for _ in range(count)]


def lines(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=number % 2 == 0) + "\n" for number, row in enumerate(rows)).encode()


def as_csv(path: Path, rows: list[Row], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_arrow(path: Path, rows: list[Row], whole_file: bool) -> Path:
    table = pa.Table.from_pylist(rows)
    make = pa.ipc.new_file if whole_file else pa.ipc.new_stream
    with path.open("wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return path


def as_parquet(path: Path, rows: list[Row]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=70)
    return path


def as_saved(folder: Path, rows: list[Row]) -> Path:
    """As `datasets.Dataset.save_to_disk` writes it: files in Arrow's stream form, and a list of them. The last name sorts first."""
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows[:200], rows[200:]), strict=True):
        as_arrow(folder / name, part, whole_file=False)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_indices_files": None}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def in_seven(folder: Path, rows: list[Row]) -> Path:
    for number in range(7):
        part = rows[number * len(rows) // 7 : (number + 1) * len(rows) // 7]
        written(folder / f"part-{number}.jsonl", lines(part))
    return folder


def in_tables(folder: Path, rows: list[Row]) -> Path:
    folder.mkdir()
    as_csv(folder / "a.csv", rows[:100])
    as_csv(folder / "b.csv", rows[100:])
    return folder


Write = Callable[[Path, list[Row]], Path]
SHAPES: dict[str, Write] = {
    "jsonl": lambda at, rows: written(at / "a.jsonl", lines(rows)),
    "jsonlines": lambda at, rows: written(at / "a.jsonlines", lines(rows)),
    "jl": lambda at, rows: written(at / "a.jl", lines(rows)),
    "ndjson, packed": lambda at, rows: written(at / "a.ndjson.zst", zstandard.compress(lines(rows))),
    "ndjson": lambda at, rows: written(at / "a.ndjson", lines(rows)),
    "no suffix": lambda at, rows: written(at / "rows", lines(rows)),
    "gzip": lambda at, rows: written(at / "a.jsonl.gz", gzip.compress(lines(rows))),
    "gzip by its bytes alone": lambda at, rows: written(at / "a.jsonl", gzip.compress(lines(rows))),
    "gzip in two members": lambda at, rows: written(at / "a.gz", gzip.compress(lines(rows[:9])) + gzip.compress(lines(rows[9:]))),
    "zstd": lambda at, rows: written(at / "a.jsonl.zst", zstandard.ZstdCompressor().compress(lines(rows))),
    "zstd in two frames": lambda at, rows: written(at / "a.zst", b"".join(map(zstandard.compress, (lines(rows[:9]), lines(rows[9:]))))),
    "bzip2": lambda at, rows: written(at / "a.jsonl.bz2", bz2.compress(lines(rows))),
    "xz": lambda at, rows: written(at / "a.jsonl.xz", lzma.compress(lines(rows))),
    "json array": lambda at, rows: written(at / "a.json", json.dumps(rows).encode()),
    "json array over many lines": lambda at, rows: written(at / "a.json", ("\ufeff" + json.dumps(rows, indent=2)).encode()),
    "json array, packed": lambda at, rows: written(at / "a.json.gz", gzip.compress(json.dumps(rows, indent=1).encode())),
    "csv": lambda at, rows: as_csv(at / "a.csv", rows),
    "tsv": lambda at, rows: as_csv(at / "a.tsv", rows, "\t"),
    "csv, packed": lambda at, rows: written(at / "b.csv.zst", zstandard.compress(as_csv(at / "a.csv", rows).read_bytes())),
    "parquet": lambda at, rows: as_parquet(at / "a.parquet", rows),
    "parquet without a suffix": lambda at, rows: as_parquet(at / "table", rows),
    "arrow file": lambda at, rows: as_arrow(at / "a.arrow", rows, whole_file=True),
    "arrow stream": lambda at, rows: as_arrow(at / "a.arrow", rows, whole_file=False),
    "save_to_disk": lambda at, rows: as_saved(at / "saved", rows),
    "a folder of seven": lambda at, rows: in_seven(at / "seven", rows),
    "a glob of seven": lambda at, rows: in_seven(at / "seven", rows) / "*.jsonl",
    "a folder of tables": lambda at, rows: in_tables(at / "tables", rows),
}


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., PreparedData]:
    """prepare(path, **settings), without the process around it."""

    def call(path: Path | str, **settings: Any) -> PreparedData:
        data = DataSection.model_validate({"train": [str(path)], "sequence_length": 32, "validation": 0.2, **settings})
        train, _, _ = resolve_job(data, CURRENT_RULES)
        data, _ = with_columns(data, train, CURRENT_RULES)
        job = PrepareJob(
            data=data, tokenizer_source="preset:llama-nano", vocab_size=384, cache_dir=tmp_path / "cache", parent_pid=0, rules=CURRENT_RULES
        )
        return prepare_here(job, lambda progress: None)

    return call


def shards_of(prepared: PreparedData) -> dict[str, bytes]:
    """The content of every file of tokens, by name; what they were made of is no part of them."""
    folders = [Path(folder) for folder in (prepared.train_dir, prepared.validation_dir) if folder is not None]
    return {f"{folder.name}/{path.name}": path.read_bytes() for folder in folders for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("shape", list(SHAPES)[1:])
def test_every_shape_gives_the_shards_of_plain_lines(tmp_path: Path, prepare: Callable[..., PreparedData], shape: str) -> None:
    rows = texts()
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    plain, other = prepare(SHAPES["jsonl"](tmp_path / "plain", rows)), prepare(SHAPES[shape](tmp_path / "other", rows))
    assert plain.num_documents == other.num_documents == len(rows)
    assert shards_of(other) == shards_of(plain)
    assert len(shards_of(plain)) >= 4


@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_doctor_reads_the_beginning_of_every_shape(tmp_path: Path, shape: str) -> None:
    """Rows without text are refused by their place before anything starts, in the words of preparation."""
    good = SHAPES[shape](tmp_path, texts(2_000))
    data = DataSection.model_validate({"train": [str(good)], "validation": None})
    assert look_at_data(data, "preset:llama-nano").refusal is None
    bad = look_at_data(data.model_copy(update={"text_field": "words"}), "preset:llama-nano").refusal
    assert bad is not None
    assert "field 'words' is missing" in bad.problem or "no tokens" in bad.problem, bad.problem


CHAT = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
SHAREGPT = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]
RECOGNISED: list[tuple[Row, dict[str, str]]] = [
    ({"text": "a", "messages": CHAT}, {}),
    ({"messages": CHAT, "id": 4}, {"messages_field": "messages"}),
    ({"conversations": SHAREGPT}, {"messages_field": "conversations"}),
    ({"messages": json.dumps(CHAT)}, {"messages_field": "messages"}),
    ({"messages": CHAT, "tools": None, "id": "x"}, {"messages_field": "messages"}),
    ({"prompt": "a", "completion": "b"}, {"prompt_field": "prompt", "completion_field": "completion"}),
    ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"prompt_field": "prompt", "completion_field": "completion"}),
    (
        {"instruction": "a", "input": "", "output": "b"},
        {"prompt_field": "instruction", "completion_field": "output", "context_field": "input"},
    ),
    (
        {"instruction": "a", "context": "c", "response": "b", "category": "x"},
        {"prompt_field": "instruction", "completion_field": "response", "context_field": "context"},
    ),
    ({"instruction": "a", "output": "b"}, {"prompt_field": "instruction", "completion_field": "output"}),
    ({"question": "a", "answer": "b"}, {"prompt_field": "question", "completion_field": "answer"}),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}),
    ({"body": "a"}, {}),
]


@pytest.mark.parametrize(("row", "fields"), RECOGNISED)
@pytest.mark.parametrize("shape", ["jsonl", "json array", "parquet"])
def test_fields_are_recognised_and_said(tmp_path: Path, row: Row, fields: dict[str, str], shape: str) -> None:
    path = SHAPES[shape](tmp_path, [row] * 3)
    data = DataSection.model_validate({"train": [str(path)]})
    train, _, _ = resolve_job(data, CURRENT_RULES)
    settled, said = with_columns(data, train, CURRENT_RULES)
    assert settled == data.model_copy(update=fields)
    assert [name for name in fields.values() if not said or name not in said[0].text] == []
    assert with_columns(data, train, 3) == (data, ()), "runs that were born before recognised nothing"


IN_TWO_WAYS: list[Row] = [
    {"messages": CHAT, "prompt": "a", "completion": "b"},
    {"prompt": "a", "completion": "b", "response": "c"},
    {"messages": CHAT, "conversations": SHAREGPT},
]


@pytest.mark.parametrize("row", IN_TWO_WAYS)
def test_rows_that_can_be_read_in_two_ways_are_refused_with_both(tmp_path: Path, row: Row) -> None:
    data = DataSection.model_validate({"train": [str(written(tmp_path / "a.jsonl", lines([row])))]})
    with pytest.raises(RequestError, match="several ways") as refused:
        with_columns(data, resolve_job(data, CURRENT_RULES)[0], CURRENT_RULES)
    assert "; or " in str(refused.value.bound)
    seen = look_at_data(data, "preset:llama-nano").refusal
    assert seen is not None
    assert "several ways" in seen.problem


def test_a_context_follows_the_instruction(tmp_path: Path, prepare: Callable[..., PreparedData]) -> None:
    alpaca = [{"instruction": "Add", "input": "1 and 2", "output": "3"}, {"instruction": "Rest", "input": "", "output": "..."}] * 20
    joined = [{"prompt": "Add\n\n1 and 2", "completion": "3"}, {"prompt": "Rest", "completion": "..."}] * 20
    first, second = prepare(written(tmp_path / "a.jsonl", lines(alpaca))), prepare(written(tmp_path / "b.jsonl", lines(joined)))
    assert shards_of(first) == shards_of(second)


BROKEN: list[tuple[str, bytes, str]] = [
    ("a.json", b'[{"text": "a"}, {"text": "b"', "element 2 of the array is no JSON, or the file is cut off"),
    ("a.json", b'[{"text": "a"} {"text": "b"}]', "followed by neither a comma"),
    ("a.json", b'[{"text": "a"}] more', "text after the end of the array"),
    ("a.json", b'[{"n": ' + b"9" * 5_000 + b"}]", "element 1 of the array is no JSON"),
    ("a.json.gz", gzip.compress(b'[{"text": "a"} {"text": "b"}]'), "a.json.gz:1: element 1 of the array is followed by neither a comma"),
    ("a.csv.zst", zstandard.compress(b"text,text\na,b\n"), "a.csv.zst:1: two columns are called 'text'"),
    ("a.json", b'[{"text": "\xff"}]', "not UTF-8: byte 0xff near byte offset 11"),
    ("a.json", b"[" + b'{"a":' * 5_000 + b"}" * 5_000 + b"]", "nested too deeply"),
    ("a.csv", b"text,text\na,b\n", "two columns are called 'text'"),
    ("a.csv", b"text;other\na;b\n", "separated by that"),
    ("a.csv", b'text\n"a\nb\n', "no rows separated by"),
    ("a.csv", b"text\n\xe9\n", "a.csv:2: not UTF-8: byte 0xe9 at byte offset 5"),
    ("a.parquet", b"PAR1\x00\x00\x00\x00PAR1", "the parquet file cannot be read"),
    ("a.arrow", b"\xff\xff\xff\xff\x10\x00\x00\x00" + bytes(16), "the arrow file cannot be read"),
    ("a.jsonl.gz", gzip.compress(lines(texts()))[:-9], "the gzip file cannot be unpacked"),
    ("a.jsonl.zst", zstandard.compress(lines(texts()))[:-9], "the zstd file cannot be unpacked"),
    ("a.jsonl.xz", lzma.compress(lines(texts()))[:-9], "the xz file cannot be unpacked"),
    ("a.jsonl.bz2", bz2.compress(lines(texts()))[:-9], "the bzip2 file cannot be unpacked"),
]


@pytest.mark.parametrize(("name", "content", "words"), BROKEN, ids=[f"{name}-{words[:40]}" for name, _, words in BROKEN])
def test_a_damaged_file_is_named_and_the_doctor_says_the_same(
    tmp_path: Path, prepare: Callable[..., PreparedData], name: str, content: bytes, words: str
) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(DataError) as refused:
        prepare(path)
    assert words in str(refused.value)
    assert str(path) in str(refused.value)
    numbers = look_at_data(DataSection.model_validate({"train": [str(path)]}), "preset:llama-nano")
    told = [*numbers.problems, *([numbers.refusal.problem] if numbers.refusal is not None else [])]
    assert any(words in problem for problem in told), told


def test_a_bad_element_of_a_large_array_is_refused_before_the_rest_is_read() -> None:
    stream = io.BytesIO(b'[{"text": "a"}, {"text": oops}, ' + b'{"text": "more"}, ' * 1_000_000)
    with pytest.raises(FileRefused, match="element 2 of the array is no JSON"):
        list(table_rows(stream, "json", DataSection()))
    assert stream.tell() <= 2 * BLOCK_BYTES


def test_columns_that_rows_of_text_do_not_need_are_not_read(tmp_path: Path) -> None:
    rows = [{"text": "a", "image_bytes": b"x" * 100, "tools": "[]"}]
    for kind, path in (("parquet", as_parquet(tmp_path / "a", rows)), ("arrow", as_arrow(tmp_path / "b", rows, whole_file=True))):
        with path.open("rb") as stream:
            assert [row.content for row in table_rows(stream, cast(Kind, kind), DataSection())] == [{"text": "a", "tools": "[]"}]
        with path.open("rb") as stream:
            (row,) = table_rows(stream, cast(Kind, kind), DataSection(text_field="body"))
            assert cast(Row, row.content).keys() == rows[0].keys(), "who names a column that is not there is told of all"


def test_rows_of_tables_that_cannot_be_used_are_bad_rows_by_their_number(tmp_path: Path, prepare: Callable[..., PreparedData]) -> None:
    as_parquet(tmp_path / "a.parquet", [{"text": "a"}, {"text": None}, {"text": "c"}])
    written(tmp_path / "b.json", b'[{"text": "a"}, 5, {"text": ""}, {"text": "b"}]')
    written(tmp_path / "c.csv", b'text,more\n"a\nb",1\nc\n\nd,2\n')
    prepared = prepare(tmp_path / "*.*", on_bad_row="skip")
    assert [row.rpartition("/")[2] for row in prepared.bad_rows] == [
        "a.parquet:2: field 'text' is null, not a string",
        "b.json:2: a number where an object is due",
        "b.json:3: field 'text' is empty",
        "c.csv:4: 1 column where the first line names 2",
    ]
    assert prepared.num_documents == 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file that is no data."""
    root = tmp_path / "folder"
    written(root / "README.md", b"# no data")
    return root


def test_folders_that_say_too_little_are_refused_with_the_choices(folder: Path) -> None:
    def refusal(**files: bytes) -> str:
        for name, content in files.items():
            written(folder / name.replace("__", "."), content)
        with pytest.raises(DataError) as refused:
            resolve_job(DataSection.model_validate({"train": [str(folder)]}), CURRENT_RULES)
        return str(refused.value)

    assert "no file with a name of data" in refusal()
    both = refusal(a__jsonl=lines(texts(2)), b__csv=b"text\na\n")
    assert "several kinds" in both
    assert f"{folder}/**/*.csv*" in both
    splits = refusal(dataset_dict__json=b'{"splits": ["train", "test"]}')
    assert f"{folder}/train, {folder}/test" in splits


def test_a_saved_dataset_lists_no_file_outside(folder: Path) -> None:
    for name in ("../a.arrow", "/etc/passwd", "", 5):
        written(folder / "state.json", json.dumps({"_data_files": [{"filename": name}]}).encode())
        with pytest.raises(DataError, match="no file of the folder"):
            resolve_job(DataSection.model_validate({"train": [str(folder)]}), CURRENT_RULES)


def test_a_compressed_file_of_text_is_one_document(tmp_path: Path, prepare: Callable[..., PreparedData]) -> None:
    text = ("one line of text\n" * 40_000).encode()
    plain = prepare(written(tmp_path / "a.txt", text))
    for name, content in (("b.txt.gz", gzip.compress(text)), ("c.txt.zst", zstandard.compress(text)), ("d.xz", lzma.compress(text))):
        assert shards_of(prepare(written(tmp_path / name, content))) == shards_of(plain)


def test_remote_files_of_every_form_and_remote_folders(tmp_path: Path, prepare: Callable[..., PreparedData]) -> None:
    import fsspec

    rows = texts()
    plain = shards_of(prepare(written(tmp_path / "a.jsonl", lines(rows))))
    held = {
        "a.jsonl.gz": gzip.compress(lines(rows)),
        "b.zst": zstandard.compress(lines(rows)),
        "c.parquet": as_parquet(tmp_path / "c.parquet", rows).read_bytes(),
        "table": as_arrow(tmp_path / "table", rows, whole_file=True).read_bytes(),
        "e.json": json.dumps(rows).encode(),
        "folder/part-0.csv": as_csv(tmp_path / "0.csv", rows[:150]).read_bytes(),
        "folder/part-1.csv": as_csv(tmp_path / "1.csv", rows[150:]).read_bytes(),
        "folder/README.md": b"# no data",
    }
    fs = fsspec.filesystem("memory")
    fs.pipe({f"/mem-shapes/{name}": content for name, content in held.items()})
    try:
        for name in ("a.jsonl.gz", "b.zst", "c.parquet", "table", "e.json", "folder"):
            url = f"memory://mem-shapes/{name}"
            assert shards_of(prepare(url)) == plain, name
            assert look_at_data(DataSection.model_validate({"train": [url]}), "preset:llama-nano").refusal is None
    finally:
        fs.rm("/mem-shapes", recursive=True)
