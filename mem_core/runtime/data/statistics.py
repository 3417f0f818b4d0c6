"""What is counted of documents while they become tokens: lengths and copies. Memory does not grow with the corpus."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

MOST_KEYS = 2_000_000
PERCENTILES = (5, 50, 95, 99)
_DIGITS = 3


class DocumentCounts:
    """Lengths to three digits, so that a histogram of any corpus has some thousand bins; copies among the first two million documents."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._lengths: Counter[int] = Counter()
        self._longest = 0
        self._open_tokens = 0
        self._keys: set[bytes] = set()
        self._fresh: list[bytes] | None = None
        self.num_copies = 0
        self.num_compared = 0

    def see(self, num_tokens: int, *, last: bool) -> None:
        """A document's tokens, or those of a part of it; `last`: it ends here."""
        self._open_tokens += num_tokens
        if last:
            self._lengths[_rounded(self._open_tokens)] += 1
            self._longest = max(self._longest, self._open_tokens)
            self._open_tokens = 0

    def compare(self, key: bytes) -> None:
        """Whether a document's content was there before, by its digest."""
        if len(self._keys) >= self._most_keys:
            return
        self.num_compared += 1
        if key in self._keys:
            self.num_copies += 1
            return
        self._keys.add(key)
        if self._fresh is not None:
            self._fresh.append(key)

    def fresh_keys(self) -> list[bytes]:
        """The keys since this was asked last; from the first time on they are kept for it."""
        fresh, self._fresh = self._fresh, []
        return list(self._keys) if fresh is None else fresh

    def state(self) -> dict[str, Any]:
        """All but the keys, as plain values."""
        lengths = [[length, count] for length, count in self._lengths.items()]
        return {"lengths": lengths, "numbers": [self._longest, self._open_tokens, self.num_copies, self.num_compared]}

    def restore(self, state: dict[str, Any], keys: Iterable[bytes]) -> None:
        """Go on from there, with all keys that were there."""
        self._lengths = Counter({int(length): int(count) for length, count in state["lengths"]})
        self._longest, self._open_tokens, self.num_copies, self.num_compared = (int(number) for number in state["numbers"])
        self._keys, self._fresh = set(keys), []

    def percentiles(self) -> dict[str, int]:
        """Tokens of a document at 5, 50, 95 and 99 of a hundred, to three digits, and of the longest; empty where there was none."""
        total = sum(self._lengths.values())
        if not total:
            return {}
        found: dict[str, int] = {}
        passed, wanted = 0, list(PERCENTILES)
        for length in sorted(self._lengths):
            passed += self._lengths[length]
            while wanted and passed * 100 >= wanted[0] * total:
                found[f"p{wanted.pop(0)}"] = length
        return {**found, "longest": self._longest}


def _rounded(number: int) -> int:
    scale = 10 ** max(0, len(str(number)) - _DIGITS)
    return number // scale * scale
