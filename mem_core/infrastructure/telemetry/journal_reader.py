"""Reads a run's journal without touching it, for report and status."""

import contextlib
from pathlib import Path

from pydantic import ValidationError

from mem_core.domain.events import JournalLine
from mem_core.infrastructure.storage.journal_file import attempt_files, read_attempt
from mem_core.infrastructure.storage.reading import why


def read_journal_lines(journal_folder: Path) -> tuple[list[JournalLine], list[str]]:
    """Lines of `attempt-000N.jsonl` in attempt order, and notes naming what could not be read.

    The last line of a file may have been cut by a crash and is dropped without a note. Any other unreadable line, such as an
    event of a later version, is left out and named. A folder that is not there is an empty journal.
    """
    lines: list[JournalLine] = []
    notes: list[str] = []
    try:
        paths = [path for _, path in attempt_files(journal_folder)]
    except OSError as exc:
        return [], [f"{journal_folder.name}: {why(exc)}"]
    for path in paths:
        _read_file(path, lines, notes)
    return lines, notes


def _read_file(path: Path, lines: list[JournalLine], notes: list[str]) -> None:
    try:
        raw = read_attempt(path)
    except OSError as exc:
        notes.append(f"{path.name}: {why(exc)}, left out")
        return
    *whole, last = raw.split(b"\n")
    for number, text in enumerate((*whole, last), start=1):
        if not text.strip():
            continue
        try:
            lines.append(JournalLine.model_validate_json(text))
        except ValidationError as exc:
            if number <= len(whole):
                notes.append(f"{path.name}:{number}: {type(exc).__name__}, left out")


def parse_journal_lines(raw: bytes) -> list[JournalLine]:
    """Those of `raw` that can be read, in order; for whoever looks on while they are written."""
    lines: list[JournalLine] = []
    for text in raw.split(b"\n"):
        with contextlib.suppress(ValidationError):
            lines += [JournalLine.model_validate_json(text)] if text.strip() else []
    return lines
