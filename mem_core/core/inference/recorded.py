"""What is written down of batches: composed before they are answered, failed where they did not fit. Pure.

A batch that was written down is answered as it was, however often the process dies meanwhile: which rows stand beside a row decides the
last bits of its numbers.
"""

from collections.abc import Iterable
from typing import Literal

from mem_core.domain.units import Value


class Composed(Value):
    """A batch that will be answered: its rows, in their order."""

    kind: Literal["composed"] = "composed"
    batch: int
    rows: tuple[int, ...]
    longest: int


class DidNotFit(Value):
    """A batch that was composed and will never be answered; its rows wait again."""

    kind: Literal["did_not_fit"] = "did_not_fit"
    batch: int
    why: str


class Recorded(Value):
    """The record so far. `answered`: numbers of the batches whose answers are on the disk."""

    composed: dict[int, Composed] = {}
    failed: tuple[Composed, ...] = ()
    answered: frozenset[int] = frozenset()

    @property
    def next_number(self) -> int:
        """Of the next batch that is composed."""
        return max(self.composed, default=-1) + 1

    @property
    def pending(self) -> Composed | None:
        """The batch that was composed and is neither answered nor given up; at most one is."""
        gone = self.answered | {batch.batch for batch in self.failed}
        return next((batch for number, batch in sorted(self.composed.items()) if number not in gone), None)

    @property
    def rows(self) -> frozenset[int]:
        """Every row that has its answer."""
        return frozenset(row for number in self.answered for row in self.composed[number].rows)


def recorded(lines: Iterable[Composed | DidNotFit], answered: Iterable[int]) -> Recorded:
    """Fold the lines of a record."""
    composed: dict[int, Composed] = {}
    failed: list[Composed] = []
    for line in lines:
        if isinstance(line, Composed):
            composed[line.batch] = line
        elif line.batch in composed:
            failed.append(composed[line.batch])
    return Recorded(composed=composed, failed=tuple(failed), answered=frozenset(number for number in answered if number in composed))


def changes(before: dict[str, str], now: dict[str, str]) -> tuple[str, ...]:
    """What decides the answers and is another than it was, in words: `seed: 0 before, 1 now`."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return tuple(f"{name}: {_shown(before.get(name))} before, {_shown(now.get(name))} now" for name in names)


def _shown(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= 40 else f"{value[:16]}..."
