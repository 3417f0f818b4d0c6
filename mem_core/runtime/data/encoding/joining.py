"""Token ids of a text too long for one call, taken in pieces and equal to those of the whole text, whatever the tokenizer.

Tokenizers need a hundred and more bytes for each character of one call, so that a file of gigabytes has to be cut. Where it is cut,
tokens come out otherwise: a mark stands before the first word of each piece, words fall apart, normalisers strip ends. So pieces
overlap, and two neighbours are joined only inside a stretch where both give the same ids for the same characters: there neither
end reaches. For byte-pair encodings that is a proof, since a sequence of tokens is the encoding of its text exactly where
each pair of neighbours is (Antwerpen and Neubeck, "So many tokens, so little time", 2024), and every pair of the joined
sequence stands in one of the two pieces; for tokenizers that work word by word it is one too. Others look for the best way to
cut a whole text, and in a repetition the phase of their tokens hangs on where it ends: there two pieces may agree by chance. So a
third one, which ends one character later than the first, has to agree as well. Where they do not (also in one word of a million
characters), the piece is made twice as long and tried again, up to the whole text. What cannot be cut up to `MOST_WHOLE_CHARS`
is refused: other ids are never given.

Memory: some 300 bytes for each character of a window (10 MB), for each character of an undivided stretch at the worst (1.2 GB).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW_CHARS = 2**15
OVERLAP_CHARS = 2**10
MOST_WHOLE_CHARS = 2**22
_FEWEST_AGREEING = 8
Tokens = NDArray[np.uint32]


def bytes_of(text: str) -> NDArray[np.uint8]:
    """A text as an array; `text_of` gives it back."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def text_of(raw: NDArray[np.uint8]) -> str:
    """What `bytes_of` was given."""
    return raw.tobytes().decode("utf-8", "surrogatepass")


class CannotBeCut(ValueError):
    """A stretch of text too long for one call, which the tokenizer gives no place to cut."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Ids with the characters that each stands for, [start, end); shapes [tokens]. Several tokens may share a character."""

    ids: Tokens
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __getitem__(self, part: slice) -> "Spans":
        return Spans(self.ids[part], self.starts[part], self.ends[part])

    def moved(self, chars: int) -> "Spans":
        """The same tokens in a text that begins `chars` earlier."""
        return Spans(self.ids, self.starts + chars, self.ends + chars)

    @classmethod
    def joined(cls, parts: Sequence["Spans"]) -> "Spans":
        """Parts end to end."""
        parts = parts or (NO_SPANS,)
        ids, starts, ends = zip(*((part.ids, part.starts, part.ends) for part in parts), strict=True)
        return cls(np.concatenate(ids), np.concatenate(starts), np.concatenate(ends))

    def same(self, other: "Spans") -> bool:
        """Whether both are the same ids for the same characters."""
        pairs = ((self.ids, other.ids), (self.starts, other.starts), (self.ends, other.ends))
        return all(np.array_equal(one, another) for one, another in pairs)

    def state(self) -> dict[str, Any]:
        """As plain values and arrays."""
        return {"ids": self.ids, "starts": self.starts, "ends": self.ends}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Spans":
        """What `state` gave."""
        return cls(state["ids"], state["starts"], state["ends"])


NO_SPANS = Spans(np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.int64))
Encode = Callable[[Sequence[str]], list[Spans]]


@dataclass(frozen=True, slots=True)
class Cutting:
    """How long pieces are: for tests that cut short texts."""

    window_chars: int = WINDOW_CHARS
    overlap_chars: int = OVERLAP_CHARS
    most_whole_chars: int = MOST_WHOLE_CHARS


class JoinedText:
    """One text that arrives in parts; `add` gives the tokens that are certain by then. Offsets count from the start of the text."""

    def __init__(self, encode: Encode, cutting: Cutting = Cutting()) -> None:
        self._encode = encode
        self._cutting = cutting
        self._text = ""  # from `_start` on
        self._start = 0
        self._window: Spans | None = None  # tokens of text[_start:_stop]
        self._stop = 0
        self._given = 0  # tokens of the window that were given out or belong to the window before

    def state(self) -> dict[str, Any]:
        """What is not certain yet."""
        window = None if self._window is None else self._window.state()
        return {"text": bytes_of(self._text), "window": window, "places": [self._start, self._stop, self._given]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._text = text_of(state["text"])
        self._window = None if state["window"] is None else Spans.of(state["window"])
        self._start, self._stop, self._given = (int(place) for place in state["places"])

    def add(self, text: str, last: bool) -> Spans:
        """Take more text.

        Raises:
            CannotBeCut: over `most_whole_chars` characters without a place to cut.
        """
        self._text += text
        certain = [*self._advance(last)]
        if last and self._window is not None:
            certain.append(self._window[self._given :])
        return Spans.joined(certain)

    def _advance(self, last: bool) -> Iterator[Spans]:
        waiting: list[_Window] = []
        while True:
            waiting = waiting or self._next_windows(last)
            if not waiting:
                return
            following = waiting.pop(0)
            if self._window is None:
                self._window, self._stop = following.spans, following.stop
                continue
            seam = _seam(self._window[self._given :], following, self._stop)
            if seam is None:
                waiting = []
                if not self._widen(last):
                    return
                continue
            before, after = seam
            yield self._window[self._given : self._given + before]
            self._window, self._given = following.spans, after
            self._text = self._text[following.start - self._start :]
            self._start, self._stop = following.start, following.stop

    def _next_windows(self, last: bool) -> "list[_Window]":
        """All windows that the text at hand allows, encoded in one call so that the tokenizer may use its threads."""
        end = self._start + len(self._text)
        size, overlap = self._cutting.window_chars, self._cutting.overlap_chars
        bounds: list[tuple[int, int]] = []
        before = [self._stop]
        while before[-1] < end:
            start = max(self._start, before[-1] - overlap) if self._window is not None or bounds else before[-1]
            stop = min(end, start + size)
            if stop - start < size and not last:
                break
            bounds.append((start, stop))
            before.append(stop)
        checks = [(start, stop + 1) for (start, _), stop in zip(bounds, before, strict=False)]
        ranges = [*bounds, *checks]
        found = self._encode([self._text[start - self._start : stop - self._start] for start, stop in ranges]) if ranges else []
        spans = [found.moved(start) for (start, _), found in zip(ranges, found, strict=True)]
        return [_Window(*bound, one, check) for bound, one, check in zip(bounds, spans, spans[len(bounds) :], strict=False)]

    def _widen(self, last: bool) -> bool:
        """Take the window anew, twice as long; False where the text for it is not there yet."""
        assert self._window is not None
        size = 2 * max(self._cutting.window_chars, self._stop - self._start)
        if size > self._cutting.most_whole_chars:
            raise CannotBeCut(f"over {self._cutting.most_whole_chars} characters without a place where this tokenizer lets them be cut")
        if len(self._text) < size and not last:
            return False
        stop = self._start + min(size, len(self._text))
        (found,) = self._encode([self._text[: stop - self._start]])
        window = found.moved(self._start)
        kept = min(self._given + _FEWEST_AGREEING // 2, self._window.ids.size) if self._given else 0
        if not self._window[:kept].same(window[:kept]):
            raise CannotBeCut("tokens that depend on text far behind them, so that this tokenizer does not let it be cut")
        self._window, self._stop = window, stop
        return True


@dataclass(frozen=True, slots=True)
class _Window:
    """Tokens of text[start:stop], and of what it shares with the window before it and one character more."""

    start: int
    stop: int
    spans: Spans
    check: Spans


def _seam(window: Spans, following: _Window, stop: int) -> tuple[int, int] | None:
    """Where to pass from a window that ends at `stop` to the next, as numbers of tokens of each; None where they do not agree.

    Only the middle half of what both cover counts: nearer to an end it may reach.
    """
    margin = (stop - following.start) // 4
    first, beyond = following.start + margin, stop - margin
    one, other, check = (_inside(spans, first, beyond) for spans in (window, following.spans, following.check))
    if one is None or other is None or check is None or one.stop - one.start < _FEWEST_AGREEING:
        return None
    if not window[one].same(following.spans[other]) or not window[one].same(following.check[check]):
        return None
    middle = (one.stop - one.start) // 2
    return one.start + middle, other.start + middle


def _inside(spans: Spans, first: int, beyond: int) -> slice | None:
    """The tokens that lie within [first, beyond); None where offsets jump back and say nothing."""
    if (np.diff(spans.starts) < 0).any() or (np.diff(spans.ends) < 0).any():
        return None
    return slice(int(np.searchsorted(spans.starts, first)), int(np.searchsorted(spans.ends, beyond, side="right")))
