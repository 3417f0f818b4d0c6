"""New journal lines of a run, read from outside while it is being written."""

from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from mem_core.domain.events import Event, JournalLine


class JournalTail:
    """Reads each attempt's file on from where it stopped. A line that is cut or not yet complete is left out."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "journal"
        self._offsets: dict[Path, int] = {}
        self.lines: list[JournalLine] = []

    def read(self) -> list[JournalLine]:
        """Lines that came since the last call, in order."""
        fresh: list[JournalLine] = []
        for path in sorted(self._folder.glob("attempt-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                raw = file.read()
            complete = raw[: raw.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(complete)
            for text in complete.splitlines():
                try:
                    fresh.append(JournalLine.model_validate_json(text))
                except ValidationError:
                    continue
        self.lines.extend(fresh)
        return fresh

    def find(self, wanted: Callable[[Event], bool], since: int = 0) -> Event | None:
        """The first event from line number `since` on that `wanted` accepts; reads on first."""
        self.read()
        return next((line.event for line in self.lines[since:] if wanted(line.event)), None)

    def mark(self) -> int:
        """Number of lines so far, for `find`."""
        self.read()
        return len(self.lines)
