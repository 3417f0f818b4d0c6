"""Reads a run's journal without touching it, for report and status."""

import json
import re
from pathlib import Path

from pydantic import ValidationError

from mem_core.domain.events import JournalLine

_ATTEMPT_NAME = re.compile(r"^attempt-(\d{4,})\.jsonl$")


def read_journal_lines(journal_folder: Path) -> tuple[list[JournalLine], list[str]]:
    """Lines of `attempt-000N.jsonl` in attempt order, and notes naming what could not be read.

    The last line of a file may have been cut by a crash and is dropped without a note. Any other unreadable line, such as an
    event of a later version, is left out and named. A folder that is not there is an empty journal.
    """
    lines: list[JournalLine] = []
    notes: list[str] = []
    for _, path in sorted(_attempt_files(journal_folder)):
        _read_file(path, lines, notes)
    return lines, notes


def _attempt_files(journal_folder: Path) -> list[tuple[int, Path]]:
    if not journal_folder.is_dir():
        return []
    matches = ((_ATTEMPT_NAME.match(path.name), path) for path in journal_folder.iterdir())
    return [(int(match.group(1)), path) for match, path in matches if match]


def _read_file(path: Path, lines: list[JournalLine], notes: list[str]) -> None:
    try:
        raw = path.read_bytes()
    except OSError as exc:
        notes.append(f"{path.name}: {exc.strerror}")
        return
    *whole, last = raw.split(b"\n")
    for number, text in enumerate((*whole, last), start=1):
        if not text.strip():
            continue
        try:
            lines.append(JournalLine.model_validate(json.loads(text)))
        except (ValueError, ValidationError, RecursionError) as exc:
            if number <= len(whole):
                notes.append(f"{path.name}:{number}: {type(exc).__name__}, left out")
