"""How far a file was read, and how its reading goes on from there."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from mem_core.domain.request import DataSection
from mem_core.runtime.data.reading.units import Read, Readable, Start, Unit, read_units


@dataclass(frozen=True, slots=True)
class Place:
    """In a plain file of lines: after the line `start`, and after `items` things that were read of the one that follows. In any other
    file: after `items` things from its beginning, which are read again and passed over; encoding takes far longer than reading.

    `documents_before`, `bad_before`: how many there were before this file. `size_bytes`: how much of it was gone through.
    """

    start: Start = Start()  # noqa: RUF009 - frozen
    items: int = 0
    line_bytes: int = 0
    size_bytes: int = 0
    documents_before: int = 0
    bad_before: int = 0

    def rest(self, file: Readable, data: DataSection, rules: int) -> Iterator[tuple[int, Read]]:
        """What comes after."""
        units = read_units(file, data, rules, self.start if self.start.line else None)
        return islice(units, self.items, None)

    def past(self, size_bytes: int, item: Read, file: Readable) -> "Place":
        """The place after one more thing that was read."""
        total = self.size_bytes + size_bytes
        if file.source.kind != "jsonl" or file.source.packing:
            return replace(self, items=self.items + 1, size_bytes=total)
        line_bytes = self.line_bytes + size_bytes
        if isinstance(item, Unit) and not item.last:
            return replace(self, items=self.items + 1, line_bytes=line_bytes, size_bytes=total)
        start = Start(self.start.line + 1, self.start.offset_bytes + line_bytes)
        return replace(self, start=start, items=0, line_bytes=0, size_bytes=total)

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Place":
        """What `state` gave."""
        return cls(**{**state, "start": Start(**state["start"])})
