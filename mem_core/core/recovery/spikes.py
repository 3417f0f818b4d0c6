"""When a loss is so far out that it counts as a fault: a robust threshold over the recent past. Pure."""

import statistics
from collections.abc import Sequence

WINDOW = 200
MIN_HISTORY = 20
MAD_TO_SIGMA = 1.4826  # of a normal distribution


def spike_at(history: Sequence[float], losses: Sequence[float], factor: float) -> int | None:
    """Index of the first of `losses` above median + `factor` × robust sigma of the `WINDOW` losses before it, or None.

    Robust: the median and the median absolute deviation hardly notice the odd high loss. The sigma is never taken below 1 % of
    the median, so that a flat curve does not make a spike of rounding. Fewer than `MIN_HISTORY` losses judge nothing.
    """
    seen = list(history[-WINDOW:])
    for index, loss in enumerate(losses):
        if len(seen) >= MIN_HISTORY and loss > _threshold(seen, factor):
            return index
        seen.append(loss)
        del seen[:-WINDOW]
    return None


def _threshold(seen: Sequence[float], factor: float) -> float:
    median = statistics.median(seen)
    deviation = statistics.median(abs(loss - median) for loss in seen)
    return median + factor * max(MAD_TO_SIGMA * deviation, 0.01 * abs(median))
