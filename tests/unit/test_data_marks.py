"""A preparation that is killed goes on from its last mark, to the same shards to the bit; nothing half-written is believed."""

import errno
import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.making.making import tokenize_files
from mem_core.runtime.data.encoding.making.reporter import Reporter
from mem_core.runtime.data.encoding.marks.ledger import Marks
from mem_core.runtime.data.encoding.marks.staging import LEFTOVER_S, MARKS, MOST_LEFTOVERS, PREFIX, staging_folder
from mem_core.runtime.data.encoding.tokenize_process import train_files
from mem_core.runtime.data.reading.units import Readable
from mem_core.runtime.data.values import PreparedData, PrepareJob, PrepareProgress
from mem_core.runtime.models.encoding import CURRENT_RULES
from mem_core.testing.tokenizer_folders import byte_level_bpe, tokenizer_folder

WHOSE = "a"
KEPT = ("marks/keys.bin", "marks/ledger.json", "arrays")


class Killed(BaseException):
    """Instead of a signal."""


class DeadlyClock:
    """Every look at it is a moment at which a mark is due; the n-th kills."""

    def __init__(self, dies_at: int | None) -> None:
        self._dies_at = dies_at
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        if self.looks == self._dies_at:
            raise Killed
        return float(self.looks)


class Work:
    """One preparation in a folder of its own, to be killed and begun again."""

    def __init__(self, folder: Path, job: PrepareJob) -> None:
        self.folder = folder
        self._job = job
        self.notes: list[str] = []

    def go(self, dies_at: int | None = None, whose: str = WHOSE, *, every: float = 3.0) -> PreparedData:
        clock = DeadlyClock(dies_at)
        train = [Readable(file, file.path, "ab" * 32) for file in train_files(self._job.data, self._job.rules)]
        report = Reporter(self._told, sum(file.source.size_bytes for file in train))
        try:
            return tokenize_files(
                self._job, train, [], self.folder / "rows", "name", report, Marks(self.folder / MARKS, whose, every, clock)
            )
        finally:
            self.looks = clock.looks

    def _told(self, progress: PrepareProgress) -> None:
        self.notes += [progress.note] if progress.note else []

    def go_on_note(self) -> str:
        return self.notes[-1] if self.notes else ""

    def shards(self) -> dict[str, bytes]:
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in sorted((self.folder / "rows").rglob("*.*"))}


def rows(path: Path, count: int, make: Callable[[int], dict[str, Any]], opened: Callable[..., Any] = open) -> str:
    with opened(path, "wt") as file:
        file.writelines(json.dumps(make(number)) + "\n" + ("\n" if number % 7 == 3 else "") for number in range(count))
    return str(path)


def text_row(number: int) -> dict[str, Any]:
    return {"text": " ".join(f"word{number * place % 13}" for place in range(number % 9 + 1))}


def pair_row(number: int) -> dict[str, Any]:
    return {"prompt": "say " * (number % 4 + 1), "completion": "words " * (number % 5 + 1)}


def lines(tmp_path: Path) -> dict[str, Any]:
    return {"train": [rows(tmp_path / "a.jsonl", 20, text_row), rows(tmp_path / "b.jsonl", 10, text_row)], "validation": 0.3}


def packed_lines(tmp_path: Path) -> dict[str, Any]:
    return {"train": [rows(tmp_path / "a.jsonl.gz", 25, text_row, gzip.open)], "packing": False}


def array(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "a.json").write_text(json.dumps([text_row(number) for number in range(20)]))
    return {"train": [str(tmp_path / "a.json"), rows(tmp_path / "b.jsonl", 6, text_row)]}


def answers(tmp_path: Path) -> dict[str, Any]:
    made = rows(tmp_path / "a.jsonl", 30, pair_row)
    return {"train": [made], "prompt_field": "prompt", "completion_field": "completion", "sequence_length": 64}


def weighted(tmp_path: Path) -> dict[str, Any]:
    names = [rows(tmp_path / f"{name}.jsonl", 12, text_row) for name in "abc"]
    return {"train": [names[0], {"path": names[1], "weight": 2}, {"path": names[2], "weight": 0.5}], "validation": 0.2}


def long_text(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "a.txt").write_text("some words of a long text " * 24_000)
    return {"train": [str(tmp_path / "a.txt"), rows(tmp_path / "b.jsonl", 4, text_row)], "validation": 0.3, "sequence_length": 512}


def truncated_text(tmp_path: Path) -> dict[str, Any]:
    return {**long_text(tmp_path), "long_documents": "truncate", "sequence_length": 100_000}


def bad_rows(tmp_path: Path) -> dict[str, Any]:
    path = Path(rows(tmp_path / "a.jsonl", 25, text_row))
    path.write_text(path.read_text().replace('{"text": "word0"}', '{"text": 5}'))
    (tmp_path / "empty.jsonl").touch()
    return {"train": [str(path), str(tmp_path / "empty.jsonl")], "on_bad_row": "skip"}


SHAPES = (lines, packed_lines, array, answers, weighted, long_text, truncated_text, bad_rows)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tokenizer_folder(tmp_path_factory.mktemp("words"), byte_level_bpe()))


def job_of(tmp_path: Path, asked: dict[str, Any], tokenizer: str) -> PrepareJob:
    data = DataSection.model_validate({"validation": None, "sequence_length": 16, **asked})
    return PrepareJob(data=data, tokenizer_source=tokenizer, vocab_size=None, cache_dir=tmp_path, parent_pid=0, rules=CURRENT_RULES)


BY_WORDS = [pytest.param(shape, "words", marks=() if shape in (answers, long_text) else pytest.mark.slow) for shape in SHAPES]


@pytest.mark.parametrize(("shape", "tokenizer"), [*((shape, "preset:llama-nano") for shape in SHAPES), *BY_WORDS])
def test_killed_anywhere_it_makes_the_same_shards(tmp_path: Path, shape: Callable[..., dict[str, Any]], tokenizer: str, words: str) -> None:
    """Killed at three places, each in a preparation of its own, and at three in turn of one and the same."""
    job = job_of(tmp_path, shape(tmp_path), words if tokenizer == "words" else tokenizer)
    whole = Work(tmp_path / "whole", job)
    expected = whole.go(every=1e9)
    marked = Work(tmp_path / "marked", job)
    every = 3.0 if shape not in (long_text, truncated_text) else 0.0  # which come in few parts
    assert marked.go(every=every) == expected
    assert marked.shards() == whole.shards()
    again = Work(tmp_path / "again", job)
    for part in (1, 2, 3):
        once = Work(tmp_path / f"once-{part}", job)
        for work, dies_at in ((once, marked.looks * part // 4), (again, marked.looks // 4)):
            with pytest.raises(Killed):
                work.go(max(dies_at, 4), every=every)
        assert once.go(every=every) == expected
        assert once.shards() == whole.shards()
    assert again.go(every=every) == expected
    assert again.shards() == whole.shards()
    assert sum("goes on after" in note for note in again.notes) >= (2 if every else 1)


def killed_halfway(tmp_path: Path) -> tuple[Work, Work, PreparedData]:
    """A whole preparation, and one of the same that was killed."""
    train = rows(tmp_path / "a.jsonl", 50, lambda number: {"text": f"many words {number} " * 400})
    job = job_of(tmp_path, {"train": [train], "validation": 0.2}, "preset:llama-nano")
    whole, work = Work(tmp_path / "whole", job), Work(tmp_path / "work", job)
    expected = whole.go(every=1e9)
    with pytest.raises(Killed):
        work.go(45)
    assert work.go_on_note() == ""
    return whole, work, expected


@pytest.mark.parametrize("place", ["rows/train/tokens-00000.bin", "rows/train/offsets.i64", "marks/keys.bin"])
def test_what_was_added_after_the_mark_is_taken_away(tmp_path: Path, place: str) -> None:
    whole, work, expected = killed_halfway(tmp_path)
    with (work.folder / place).open("ab") as file:
        file.write(b"half a row")
    (work.folder / "rows" / "train" / "tokens-00001.bin").write_bytes(b"a shard that was begun")
    assert work.go() == expected
    assert work.shards() == whole.shards()
    assert "goes on after" in work.go_on_note()


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(
    "place", ["rows/train/tokens-00000.bin", "rows/train/lengths.i32", "marks/keys.bin", "marks/ledger.json", "arrays"]
)
def test_a_mark_that_does_not_prove_itself_is_not_gone_on_from(tmp_path: Path, place: str, flip: bool) -> None:
    """One flipped bit, or an end that is missing: it begins anew, and says so where there was something to go on from."""
    whole, work, expected = killed_halfway(tmp_path)
    path = work.folder / place if place != "arrays" else latest_arrays(work.folder)
    raw = bytearray(path.read_bytes())
    if flip:
        raw[len(raw) // 3] ^= 4
    else:
        del raw[len(raw) // 3 :]
    path.write_bytes(raw)
    assert work.go() == expected
    assert work.shards() == whole.shards()
    assert "goes on after" not in work.go_on_note()


def latest_arrays(folder: Path) -> Path:
    text = json.loads((folder / MARKS / "ledger.json").read_text())["text"]
    return folder / MARKS / f"arrays-{json.loads(text)['number'] % 2}.bin"


def test_changed_sources_begin_anew_and_say_so(tmp_path: Path) -> None:
    whole, work, expected = killed_halfway(tmp_path)
    assert work.go(whose="other") == expected
    assert work.shards() == whole.shards()
    assert "have changed since" in work.go_on_note()


def test_rows_after_too_many_bad_ones_are_never_marked(tmp_path: Path) -> None:
    """They were only counted; whoever goes on with a larger bound has to see them encoded."""
    asked = {**bad_rows(tmp_path), "on_bad_row": "fail"}
    work = Work(tmp_path / "work", job_of(tmp_path, asked, "preset:llama-nano"))
    with pytest.raises(Killed):
        work.go(15)
    allowed = {**asked, "on_bad_row": "skip"}
    whole, again = (Work(folder, job_of(tmp_path, allowed, "preset:llama-nano")) for folder in (tmp_path / "whole", work.folder))
    assert again.go() == whole.go(every=1e9)
    assert again.shards() == whole.shards()


def leftover(cache_dir: Path, name: str, age_s: float, *, mark: bool = True) -> Path:
    folder = cache_dir / f"{PREFIX}{name}"
    (folder / MARKS).mkdir(parents=True)
    if mark:
        (folder / MARKS / "ledger.json").touch()
    for path in (folder / MARKS, folder):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_leftovers_of_the_dead_are_few_and_go_after_a_while(tmp_path: Path) -> None:
    young = [leftover(tmp_path, f"young-{number}", 100.0 + number) for number in range(MOST_LEFTOVERS + 2)]
    without = leftover(tmp_path, "without", 1.0, mark=False)
    old = leftover(tmp_path, "old", LEFTOVER_S + 60)
    with staging_folder(tmp_path, "asked") as (folder, is_named):
        assert is_named
        assert [path.exists() for path in young] == [True] * MOST_LEFTOVERS + [False] * 2
        assert not without.exists()
        assert not old.exists()
        with staging_folder(tmp_path, "asked") as (other, is_named):
            assert not is_named, "somebody is at work on the same"
            assert other != folder
            assert folder.exists()
    assert not folder.exists()


@pytest.mark.parametrize(("number", "stays"), [(errno.ENOSPC, True), (errno.EACCES, False)])
def test_a_full_disk_leaves_what_can_be_gone_on_from(tmp_path: Path, number: int, stays: bool) -> None:
    with pytest.raises(OSError, match="nothing"), staging_folder(tmp_path, "asked") as (folder, _):
        raise OSError(number, "nothing")
    assert folder.exists() == stays
