"""Long documents come in parts, which may go to different sides of a held-out split: which tokens belong to which part."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mem_core.runtime.data.encoding.joining import CannotBeCut, Cutting, Encode, JoinedText, Spans, Tokens, bytes_of, text_of

Plain = Callable[[Sequence[str]], list[Tokens]]


class PartedText(Protocol):
    """One document's parts in order; each call gives the tokens of those parts that are complete by then, in order."""

    def add(self, text: str, last: bool) -> list[Tokens]:
        """Take the next part. Raises CannotBeCut."""
        ...

    def state(self) -> dict[str, Any]:
        """What is kept of the parts so far: plain values and arrays."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there; nothing was added yet."""
        ...


class CutAnywhere:
    """For encodings in which no character knows its neighbours: each part by itself."""

    def __init__(self, encode: Plain) -> None:
        self._encode = encode

    def add(self, text: str, last: bool) -> list[Tokens]:
        """The part's own tokens, at once."""
        del last
        return self._encode([text])

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing."""


class CutByOffsets:
    """Tokens belong to the part in which their characters begin."""

    def __init__(self, encode: Encode, cutting: Cutting = Cutting()) -> None:  # noqa: B008 - frozen
        self._text = JoinedText(encode, cutting)
        self._ends: list[int] = []
        self._total_chars = 0
        self._waiting: list[Spans] = []

    def add(self, text: str, last: bool) -> list[Tokens]:
        """Parts up to where tokens are certain. Raises CannotBeCut."""
        self._total_chars += len(text)
        self._ends.append(self._total_chars)
        self._waiting.append(self._text.add(text, last))
        ready = Spans.joined(self._waiting)
        done: list[Tokens] = []
        while self._ends and (last or (ready.starts.size and ready.starts[-1] >= self._ends[0])):
            final = last and len(self._ends) == 1
            count = ready.ids.size if final else int(np.searchsorted(ready.starts, self._ends.pop(0)))
            if final:
                self._ends.clear()
            done.append(ready.ids[:count])
            ready = ready[count:]
        self._waiting = [ready]
        return done

    def state(self) -> dict[str, Any]:
        """The tokens that belong to parts whose end is not certain."""
        waiting = Spans.joined(self._waiting).state()
        return {"text": self._text.state(), "ends": list(self._ends), "total_chars": self._total_chars, "waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._text.restore(state["text"])
        self._ends, self._total_chars = [int(end) for end in state["ends"]], int(state["total_chars"])
        self._waiting = [Spans.of(state["waiting"])]


class CutWhereSeamsHold:
    """For tokenizers that do not tell which characters a token stands for.

    Parts are cut only where the text around the cut has the tokens of its two sides; parts between which it has not are encoded
    as one, and the tokens belong to the first of them.
    """

    def __init__(self, encode: Plain, cutting: Cutting = Cutting()) -> None:  # noqa: B008 - frozen
        self._encode = encode
        self._cutting = cutting
        self._text = ""
        self._parts = 0

    def add(self, text: str, last: bool) -> list[Tokens]:
        """Parts whose end is proven to be a place to cut. Raises CannotBeCut."""
        done: list[Tokens] = []
        if self._parts and self._holds(self._text[-self._cutting.overlap_chars :], text[: self._cutting.overlap_chars]):
            done = self._finish()
        self._text += text
        self._parts += 1
        if len(self._text) > self._cutting.most_whole_chars:
            raise CannotBeCut(f"over {self._cutting.most_whole_chars} characters without a place where this tokenizer lets them be cut")
        return [*done, *self._finish()] if last else done

    def state(self) -> dict[str, Any]:
        """The text that was not encoded yet."""
        return {"text": bytes_of(self._text), "parts": self._parts}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._text, self._parts = text_of(state["text"]), int(state["parts"])

    def _holds(self, before: str, after: str) -> bool:
        both, one, other = self._encode([before + after, before, after])
        return np.array_equal(both, np.concatenate([one, other]))

    def _finish(self) -> list[Tokens]:
        (tokens,) = self._encode([self._text])
        rest = [np.zeros(0, np.uint32)] * (self._parts - 1)
        self._text, self._parts = "", 0
        return [tokens, *rest]
