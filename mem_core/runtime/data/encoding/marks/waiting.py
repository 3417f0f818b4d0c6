"""Units on their way to rows, and a very long document that comes in parts."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mem_core.runtime.data.encoding.joining import Tokens
from mem_core.runtime.data.encoding.parts import PartedText
from mem_core.runtime.data.encoding.sequences import Rows
from mem_core.runtime.data.reading.rows import Document
from mem_core.runtime.data.reading.units import Unit


@dataclass(frozen=True, slots=True)
class Target:
    """Where rows go; `held_out` is None for a list's own rows and a fraction where some are for validation."""

    rows: Rows
    validation: Rows | None = None
    held_out: float = 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A unit, where its rows go, and the file that it came from."""

    unit: Unit
    rows: Rows
    path: str

    def state(self, makers: Sequence[Rows]) -> dict[str, Any]:
        """Everything but the text, which has gone to whoever joins the parts."""
        side = next(number for number, maker in enumerate(makers) if maker is self.rows)
        return {"line": self.unit.line, "first": self.unit.first, "last": self.unit.last, "side": side, "path": self.path}

    @classmethod
    def of(cls, state: dict[str, Any], makers: Sequence[Rows]) -> "Waiting":
        """What `state` gave."""
        unit = Unit(Document(), b"", int(state["line"]), first=bool(state["first"]), last=bool(state["last"]))
        return cls(unit, makers[int(state["side"])], str(state["path"]))


class LongDocument:
    """A document in parts: its tokens part by part, or its beginning alone where no more of it becomes a row."""

    def __init__(self, text: PartedText, first: Waiting | None, *, in_chunks: bool, limit: int) -> None:
        self._text = text
        self._first = first  # a document that gives one row only goes where its first part goes
        self._in_chunks = in_chunks
        self._limit = limit
        self._parts: deque[Waiting] = deque()
        self._beginning: Tokens = np.zeros(0, np.uint32)

    def take(self, item: Waiting) -> Iterator[tuple[Waiting, Tokens]]:
        """What is ready once this part is there: chunks are rows by themselves. What is beyond the beginning need not be encoded.

        Raises:
            CannotBeCut: no place where the tokenizer lets the text be cut.
        """
        if self._in_chunks or self._beginning.size <= self._limit:
            self._parts.append(item)
            for tokens in self._text.add(item.unit.document.text, item.unit.last):
                part = self._parts.popleft()
                if self._in_chunks:
                    yield part, tokens
                else:
                    self._beginning = np.concatenate([self._beginning, tokens])
        if item.unit.last and not self._in_chunks:
            assert self._first is not None
            yield replace(self._first, unit=replace(item.unit, first=True)), self._beginning

    def state(self, makers: Sequence[Rows]) -> dict[str, Any]:
        """Plain values and arrays."""
        assert self._first is not None
        parts = [part.state(makers) for part in self._parts]
        return {"text": self._text.state(), "first": self._first.state(makers), "parts": parts, "beginning": self._beginning}

    def restore(self, state: dict[str, Any], makers: Sequence[Rows]) -> None:
        """Go on from there."""
        self._text.restore(state["text"])
        self._first = Waiting.of(state["first"], makers)
        self._parts = deque(Waiting.of(part, makers) for part in state["parts"])
        self._beginning = state["beginning"]
