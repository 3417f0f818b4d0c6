"""Whether a journal is whole: lines that cannot be read, and lines that do not follow the one before them. Reads only."""

import hashlib
from pathlib import Path

from pydantic import ValidationError

from mem_core.domain.events import GENESIS_SHA256, JournalLine
from mem_core.domain.units import Value

MOST_NAMED = 3


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


def check_journal(folder: Path) -> JournalDamage:
    """Look at every complete line of every attempt. The end of a file that a crash cut is no damage: nothing had relied on it."""
    places: list[str] = []
    expected: str | None = GENESIS_SHA256
    for path in sorted(folder.glob("attempt-*.jsonl"), key=lambda item: int(item.stem.removeprefix("attempt-"))):
        for number, raw in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                line = JournalLine.model_validate_json(raw)
            except ValidationError:
                places.append(f"{path.name} line {number} cannot be read")
                expected = None  # what follows names its digest, which is not known any more
                continue
            if expected is not None and line.previous_sha256 != expected:
                places.append(f"{path.name} line {number} does not follow the line before it")
            expected = hashlib.sha256(raw).hexdigest()
    return JournalDamage(places=tuple(places))
