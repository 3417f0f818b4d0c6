"""The tolerant journal reader: attempt order, cut last lines, foreign lines named."""

from pathlib import Path

from mem_core.domain.events import Noted
from mem_core.infrastructure.telemetry.journal_reader import read_journal_lines
from mem_core.testing.synthetic_run import JournalBuilder


def test_attempts_are_read_by_number_and_not_by_name(tmp_path: Path) -> None:
    builder = JournalBuilder()
    for _ in range(12):
        builder.start().add(Noted(text="x"))
    builder.write(tmp_path)
    (tmp_path / "attempt-0012.jsonl").rename(tmp_path / "attempt-10000.jsonl")
    lines, notes = read_journal_lines(tmp_path)
    assert (lines, notes) == (builder.lines, [])


def test_a_cut_last_line_is_dropped_and_damage_elsewhere_is_named(tmp_path: Path) -> None:
    builder = JournalBuilder().start().add(Noted(text="a"), Noted(text="b"), Noted(text="c"))
    path = builder.write(tmp_path) / "attempt-0001.jsonl"
    rows = path.read_bytes().split(b"\n")
    rows[1] = b'{"event": "of a later version"}'
    rows[2] = b"\xff\xfe not JSON"
    path.write_bytes(b"\n".join(rows[:4])[:-20])
    lines, notes = read_journal_lines(tmp_path)
    assert lines == builder.lines[:1]
    assert [note.split(" ")[0] for note in notes] == ["attempt-0001.jsonl:2:", "attempt-0001.jsonl:3:"]


def test_a_whole_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    builder = JournalBuilder().start().add(Noted(text="a"))
    path = builder.write(tmp_path) / "attempt-0001.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_journal_lines(tmp_path) == (builder.lines, [])


def test_no_folder_is_an_empty_journal(tmp_path: Path) -> None:
    assert read_journal_lines(tmp_path / "absent") == ([], [])
