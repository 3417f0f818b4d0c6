"""Which rank is slower than its peers by a robust margin. Pure."""

import statistics
from collections import deque
from collections.abc import Sequence

MARGIN = 1.5
MIN_EXCESS_S = 0.001
WINDOW = 50


class StragglerWatch:
    """Takes the ranks' own compute seconds of steps; names a rank once it has been slow over a whole window.

    Wall time of a step is the same for all ranks, since they wait for each other: what is compared is the time each one works.
    """

    def __init__(self, num_ranks: int) -> None:
        self._seconds: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(num_ranks)]
        self._named: int | None = None

    def take(self, compute_s: Sequence[float]) -> tuple[int, float] | None:
        """(rank, how many times slower) when a rank begins to be a straggler, else None. One more call per step."""
        for seconds, value in zip(self._seconds, compute_s, strict=True):
            seconds.append(value)
        found = slow_rank([list(seconds) for seconds in self._seconds]) if len(self._seconds[0]) == WINDOW else None
        rank = found[0] if found else None
        fresh = rank is not None and rank != self._named
        self._named = rank
        return found if fresh else None


def slow_rank(seconds: Sequence[Sequence[float]]) -> tuple[int, float] | None:
    """The rank whose median is above `MARGIN` × the median of its peers' medians, and by how much; None where none is."""
    if len(seconds) < 2:
        return None
    medians = [statistics.median(values) for values in seconds]
    worst = max(range(len(medians)), key=lambda rank: medians[rank])
    peers = statistics.median(value for rank, value in enumerate(medians) if rank != worst)
    slow = medians[worst] > MARGIN * peers and medians[worst] - peers > MIN_EXCESS_S
    return (worst, medians[worst] / peers) if slow and peers > 0 else None
