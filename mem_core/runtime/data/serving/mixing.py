"""How weighted sources make an epoch. Pure.

Rows of each source follow each other in the folder. A source of n rows and weight w gives round(w * n) rows to each epoch, at least one,
taken from an endless stream of its own: one keyed permutation of its rows after another. So a weight of 2 shows every row twice in an
epoch, one of 0.5 a half of them and the other half in the next, and over many epochs no row is seen once more than another. The rows of
an epoch, from all sources, come in one more keyed permutation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mem_core.domain.request import DataSection


@dataclass(frozen=True, slots=True)
class Mix:
    """Rows of each source, and how many of them an epoch draws."""

    rows: tuple[int, ...]
    draws: tuple[int, ...]

    @property
    def epoch_rows(self) -> int:
        """Rows that an epoch shows."""
        return sum(self.draws)


Samples = int | Mix
"""So many rows, each once in an epoch, or sources with weights."""


def draws_of(rows: Sequence[int], weights: Iterable[float]) -> tuple[int, ...]:
    """Rows of an epoch of each source. By decimal digits and not by bits: a tenth of 100 rows is 10 rows; a half is rounded up."""
    return tuple(max(1, (2 * Fraction(str(weight)) * count + 1).__floor__() // 2) for count, weight in zip(rows, weights, strict=True))


def samples_of(data: DataSection, num_rows: int, source_rows: tuple[int, ...]) -> Samples:
    """What the order of a run goes over: a folder of `num_rows` rows, of which each weighted source has some.

    Raises:
        ValueError: rows of a folder that was not made for these sources.
    """
    if not data.is_weighted:
        return num_rows
    if len(source_rows) != len(data.train) or sum(source_rows) != num_rows:
        raise ValueError(f"{len(data.train)} sources with {num_rows} rows, and the folder holds those of {len(source_rows)}")
    return Mix(source_rows, draws_of(source_rows, data.train_weights))
