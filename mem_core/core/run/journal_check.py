"""Whether a journal is whole: lines that cannot be read, and lines that do not follow the one before them. Pure but for one reader."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from mem_core.domain.events import GENESIS_SHA256, Event, JournalLine
from mem_core.domain.units import Value
from mem_core.infrastructure.storage.journal_file import attempt_files, read_attempt

JournalFiles = list[tuple[str, bytes]]
MOST_NAMED = 3


class Difference(Value):
    """One place where a journal does not agree with itself."""

    where: str
    what: str


class LateLines(Value):
    """Lines that a replaced holder wrote after the next attempt had begun: no damage, since that attempt never saw them."""

    next_file: str
    events: tuple[Event, ...]


class JournalChain:
    """Walks raw lines, keeps the events and what the next line has to point back to."""

    def __init__(self) -> None:
        self._known: list[str] = [GENESIS_SHA256]
        self._previous: str | None = GENESIS_SHA256
        self.events: list[tuple[str, Event]] = []
        self.differences: list[Difference] = []
        self.late: list[LateLines] = []
        self.cut: list[str] = []
        """Files whose last line a crash cut: nothing had relied on it."""

    def take_file(self, name: str, content: bytes) -> None:
        """The next attempt's lines."""
        *lines, rest = content.split(b"\n")
        if rest:
            self.cut.append(name)
        for number, raw in enumerate(lines, start=1):
            where = f"{name} line {number}"
            try:
                line = JournalLine.model_validate_json(raw)
            except ValidationError:
                self.differences.append(Difference(where=where, what="cannot be read"))
                self._previous = None  # the next line names its digest, which nobody knows any more
                continue
            if number == 1:
                self._begin_file(name, line)
            self._take(where, raw, line)

    def _begin_file(self, name: str, line: JournalLine) -> None:
        """A new attempt points to the last line that it saw; a replaced holder may have written some after that."""
        if self._previous is None or line.previous_sha256 == self._previous or line.previous_sha256 not in self._known:
            return
        late = len(self._known) - 1 - self._known.index(line.previous_sha256)
        self._previous = line.previous_sha256
        self.late.append(LateLines(next_file=name, events=tuple(event for _, event in self.events[-late:])))

    def _take(self, where: str, raw: bytes, line: JournalLine) -> None:
        if self._previous is not None and line.previous_sha256 != self._previous:
            self.differences.append(Difference(where=where, what="does not follow the line before it"))
        self._previous = hashlib.sha256(raw).hexdigest()
        self._known.append(self._previous)
        self.events.append((where, line.event))


class JournalDamage(Value):
    """Places in reading order, such as `attempt-0001.jsonl line 7 cannot be read`."""

    places: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.places)

    def __str__(self) -> str:
        """One sentence for people and the journal itself."""
        more = f" and {len(self.places) - MOST_NAMED} more" if len(self.places) > MOST_NAMED else ""
        return (
            f"the journal is damaged: {'; '.join(self.places[:MOST_NAMED])}{more}. Lines that cannot be read are left out; checkpoints "
            "carry the history up to them, so that only decisions after the newest one may be made anew"
        )


def journal_files(folder: Path) -> JournalFiles:
    """(name, content) of every attempt's file, in the order of attempts. Raises OSError."""
    return [(path.name, read_attempt(path)) for _, path in attempt_files(folder)]


def walk_journal(files: Iterable[tuple[str, bytes]]) -> JournalChain:
    """Follow the hash chain over all attempts. Never raises for any content."""
    chain = JournalChain()
    for name, content in files:
        chain.take_file(name, content)
    return chain


def check_journal(folder: Path) -> JournalDamage:
    """Look at every complete line of every attempt."""
    chain = walk_journal(journal_files(folder))
    return JournalDamage(places=tuple(f"{difference.where} {difference.what}" for difference in chain.differences))
