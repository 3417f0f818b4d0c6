"""How much a forward and backward pass needs: a line through a few measured passes. Pure.

peak(rows, length) = fixed + per_token * rows * length + per_square * rows * length**2

The squared term is there only where attention is not memory-efficient; it is fitted when a straight line leaves a large error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mem_core.core.memory.ladder import MicroBatch

STRAIGHT_ENOUGH = 0.05  # residual of a straight line, as a part of the largest reading, below which no squared term is fitted


@dataclass(frozen=True, slots=True)
class PeakSample:
    """One measured pass: bytes above what was used before it."""

    micro_batch: MicroBatch
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class PeakLine:
    """The fitted model; `error_bytes` is the largest residual of the samples."""

    fixed_bytes: float
    per_token: float
    per_square: float = 0.0
    error_bytes: float = 0.0
    num_samples: int = 0

    def predict(self, micro_batch: MicroBatch) -> int:
        """Bytes above what is used before the pass."""
        squares = micro_batch.rows * micro_batch.length**2
        return round(self.fixed_bytes + self.per_token * micro_batch.tokens + self.per_square * squares)

    def tokens_that_fit(self, free_bytes: float, length: int) -> int:
        """Most padded tokens of a pass in rows of `length` that stay within `free_bytes`, the error left as a margin; 0 if none."""
        per_token = self.per_token + self.per_square * length
        left = free_bytes - self.fixed_bytes - self.error_bytes
        if left <= 0:
            return 0
        return int(left / per_token) if per_token > 0 else 2**31


def fit_line(samples: Sequence[PeakSample]) -> PeakLine | None:
    """The line through measured passes, never falling with size; None with fewer than two sizes."""
    if len({sample.micro_batch.tokens for sample in samples}) < 2:
        return None
    straight = _with_error(_fit(samples, per_square=0.0), samples)
    largest = max(sample.peak_bytes for sample in samples)
    if straight.error_bytes <= STRAIGHT_ENOUGH * largest or len(samples) < 4 or len({s.micro_batch.length for s in samples}) < 2:
        return straight
    curved = _with_error(_fit(samples, per_square=_best_square(samples)), samples)
    return curved if curved.error_bytes < straight.error_bytes else straight


def _fit(samples: Sequence[PeakSample], per_square: float) -> PeakLine:
    """Ordinary least squares in the tokens, for a given squared term."""
    tokens = [float(sample.micro_batch.tokens) for sample in samples]
    rest = [sample.peak_bytes - per_square * sample.micro_batch.rows * sample.micro_batch.length**2 for sample in samples]
    mean_tokens, mean_rest = sum(tokens) / len(tokens), sum(rest) / len(rest)
    spread = sum((value - mean_tokens) ** 2 for value in tokens)
    slope = max(0.0, sum((x - mean_tokens) * (y - mean_rest) for x, y in zip(tokens, rest, strict=True)) / spread)
    return PeakLine(mean_rest - slope * mean_tokens, slope, per_square, 0.0, len(samples))


def _best_square(samples: Sequence[PeakSample]) -> float:
    """The squared term of least error: golden-section search, since the error is convex in it."""
    low, high = 0.0, max(sample.peak_bytes / (sample.micro_batch.rows * sample.micro_batch.length**2) for sample in samples)
    ratio = 0.618033988749895
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if _squared_error(samples, left) < _squared_error(samples, right):
            high = right
        else:
            low = left
    return (low + high) / 2


def _squared_error(samples: Sequence[PeakSample], per_square: float) -> float:
    line = _fit(samples, per_square)
    return sum((line.predict(sample.micro_batch) - sample.peak_bytes) ** 2 for sample in samples)


def _with_error(line: PeakLine, samples: Sequence[PeakSample]) -> PeakLine:
    error = max(abs(line.predict(sample.micro_batch) - sample.peak_bytes) for sample in samples)
    return PeakLine(line.fixed_bytes, line.per_token, line.per_square, float(error), len(samples))
