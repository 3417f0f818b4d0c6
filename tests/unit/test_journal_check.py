"""Damage in a journal is named by file and line; what crashes leave behind is no damage."""

from pathlib import Path

import pytest

from mem_core.core.run.journal_check import check_journal
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.events import Noted


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Two attempts of five lines each."""
    for _ in range(2):
        state = StateManager.acquire(tmp_path, "run")
        for number in range(5):
            state.emit(Noted(text=f"note {number}"))
        state.release()
    return tmp_path / "run" / "journal"


def change(path: Path, line: int, old: bytes, new: bytes) -> None:
    lines = path.read_bytes().split(b"\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    path.write_bytes(b"\n".join(lines))


def test_a_whole_journal_and_one_that_a_crash_cut(journal: Path) -> None:
    """Both are whole."""
    assert not check_journal(journal)
    last = journal / "attempt-0002.jsonl"
    last.write_bytes(last.read_bytes()[:-20])
    assert not check_journal(journal)
    assert not check_journal(journal / "nowhere")


def test_late_lines_of_a_replaced_holder_are_no_damage(tmp_path: Path) -> None:
    """An attempt that was stopped and wakes up after the next one began writes lines that this one never saw."""
    older = StateManager.acquire(tmp_path, "run", clock=lambda: 0.0)
    older.emit(Noted(text="seen"))
    newer = StateManager.acquire(tmp_path, "run")
    older.emit(Noted(text="late"))
    newer.emit(Noted(text="goes on"))
    newer.release()
    assert not check_journal(tmp_path / "run" / "journal")


def test_a_line_that_cannot_be_read_is_named_once(journal: Path) -> None:
    """Zero bytes in the middle."""
    change(journal / "attempt-0001.jsonl", 3, b"note 2", b"\0\0\0\0\0\0")
    damage = check_journal(journal)
    assert damage.places == ("attempt-0001.jsonl line 3 cannot be read",)
    assert "left out" in str(damage)


def test_a_line_that_was_bent_is_named_by_the_one_after_it(journal: Path) -> None:
    """Still JSON, with other words; also over the border of two attempts."""
    change(journal / "attempt-0001.jsonl", 5, b"note 4", b"note 9")
    assert check_journal(journal).places == ("attempt-0002.jsonl line 1 does not follow the line before it",)


def test_a_line_that_was_taken_out_is_seen(journal: Path) -> None:
    """And many places are counted, not listed."""
    path = journal / "attempt-0002.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], *lines[2:]]))
    assert check_journal(journal).places == ("attempt-0002.jsonl line 2 does not follow the line before it",)
    (journal / "attempt-0001.jsonl").write_bytes(b"{}\n" * 9)
    assert "and 7 more" in str(check_journal(journal))
