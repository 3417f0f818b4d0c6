"""Bounded retries with back-off and jitter: when to try again is data."""

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """At most `attempts` tries; the n-th pause is random between half and all of min(first × 2^n, longest) seconds."""

    attempts: int = 7
    first_delay_s: float = 0.2
    longest_delay_s: float = 10.0

    def delays_s(self, rng: random.Random) -> Iterator[float]:
        """The pauses between tries: `attempts` - 1 of them, then the end."""
        for number in range(self.attempts - 1):
            whole = min(self.first_delay_s * 2**number, self.longest_delay_s)
            yield whole * (0.5 + rng.random() / 2)
