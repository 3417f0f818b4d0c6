"""What is counted of documents while they become tokens: lengths and copies. Memory does not grow with the corpus."""

from collections import Counter

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
        self._keys.add(key)

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
