"""Tokenised documents to training rows: packed into full sequences, or one document (or chunk) a row."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.request import DataSection
from mem_core.runtime.data.serving.shards import BEGINS_DOCUMENT, ShardWriter, trained_labels

Mask = NDArray[np.uint8]
_FLUSH_TOKENS = 65_536
_MOST_OPEN_ROWS = 64
_NO_TOKENS, _NO_MASK = np.zeros(0, np.uint32), np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class RowForm:
    """What rows hold beside tokens. `masked`: some labels do not count. `apart`: packed documents do not see each other, so that it is
    kept where each begins. `undivided`: packing puts no document into two rows."""

    masked: bool = False
    apart: bool = False
    undivided: bool = False

    @property
    def has_mask(self) -> bool:
        """Whether a byte is kept for each token."""
        return self.masked or self.apart


class Rows(Protocol):
    """Where tokenised documents go; `dropped` counts by kind what does not become a row."""

    dropped: Counter[str]

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far and not dropped."""
        ...

    def add(self, tokens: NDArray[np.integer], mask: Mask | None, *, own_row: bool = False) -> None:
        """Take one document or part, shape [tokens]; `mask` is there exactly when the writer stores masks."""
        ...

    def finish(self) -> None:
        """Write what is left."""
        ...

    def state(self) -> dict[str, Any]:
        """What is not with the writer yet: plain values and arrays."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there; nothing was added yet."""
        ...


def rows_for(writer: ShardWriter, data: DataSection, form: RowForm) -> Rows:
    """The maker of rows of this form."""
    return UndividedRows(writer, data) if form.undivided and data.packing else RowMaker(writer, data, form.has_mask)


class RowMaker:
    """Feeds one ShardWriter. Documents come in order, whole or (only with long_documents: chunk) in consecutive parts.

    With packing, documents follow each other and are cut every `sequence_length` tokens; a last incomplete sequence is
    dropped unless it would be the only row. Rows without a single label that counts are dropped. `dropped` counts by kind.
    """

    def __init__(self, writer: ShardWriter, data: DataSection, has_mask: bool) -> None:
        self._writer = writer
        self._data = data
        self._has_mask = has_mask
        self._tokens: list[NDArray[np.integer]] = []
        self._masks: list[Mask] = []
        self._lengths: list[int] = []
        self._waiting = 0
        self._rows_before = writer.num_rows
        self.dropped: Counter[str] = Counter()

    def state(self) -> dict[str, Any]:
        """What is not with the writer yet."""
        return {
            "tokens": np.concatenate([*self._tokens, _NO_TOKENS]), "masks": np.concatenate([*self._masks, _NO_MASK]),
            "lengths": list(self._lengths), "rows_before": self._rows_before, "dropped": dict(self.dropped),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._tokens, self._lengths = [state["tokens"]], [int(length) for length in state["lengths"]]
        self._masks = [state["masks"]] if self._has_mask else []
        self._waiting, self._rows_before = int(state["tokens"].size), int(state["rows_before"])
        self.dropped = Counter(state["dropped"])

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far and not dropped."""
        return self._writer.num_tokens + self._waiting

    def add(self, tokens: NDArray[np.integer], mask: Mask | None, *, own_row: bool = False) -> None:
        """Take one document or part, shape [tokens]; `mask` is there exactly when the writer stores masks.

        `own_row`: at most a sequence long, and not to be divided over two by packing; it is a row at once, before what still waits.
        """
        limit = self._data.sequence_length
        if own_row:
            self._write(tokens, np.array([tokens.size], np.int64), mask)
            return
        if tokens.size > limit and self._data.long_documents == "truncate":
            tokens, mask = tokens[:limit], None if mask is None else mask[:limit]
            self.dropped["truncated_documents"] += 1
        self._tokens.append(tokens)
        if mask is not None:
            self._masks.append(mask)
        if not self._data.packing:
            full, rest = divmod(tokens.size, limit)
            self._lengths.extend([limit] * full + ([rest] if rest else []))
        self._waiting += tokens.size
        if self._waiting >= max(_FLUSH_TOKENS, limit):
            self._flush()

    def finish(self) -> None:
        """Write what is left."""
        self._flush()
        if self._waiting and self._writer.num_rows == self._rows_before:
            self._lengths = [self._waiting]
            self._flush()
        elif self._waiting:
            self.dropped["last_partial_sequence"] += 1

    def _flush(self) -> None:
        if not self._waiting:
            return
        tokens = np.concatenate(self._tokens)
        mask = np.concatenate(self._masks) if self._has_mask else None
        lengths = self._lengths or [self._data.sequence_length] * (tokens.size // self._data.sequence_length)
        used = sum(lengths)
        self._write(tokens[:used], np.array(lengths, np.int64), None if mask is None else mask[:used])
        self._tokens, self._lengths = [tokens[used:].copy()], []
        self._masks = [] if mask is None else [mask[used:].copy()]
        self._waiting = tokens.size - used

    def _write(self, tokens: NDArray[np.integer], lengths: NDArray[np.int64], mask: Mask | None) -> None:
        without = _write_trained(self._writer, tokens, lengths, mask)
        if without:
            self.dropped["rows_without_trained_label"] += without


def _write_trained(writer: ShardWriter, tokens: NDArray[np.integer], lengths: NDArray[np.int64], mask: Mask | None) -> int:
    """Write the rows that have a label that counts; how many have none."""
    keep = trained_labels(lengths, mask) > 0
    if not keep.all():
        kept_tokens = np.repeat(keep, lengths)
        tokens, mask, lengths = tokens[kept_tokens], None if mask is None else mask[kept_tokens], lengths[keep]
    writer.write(tokens, lengths, mask)
    return int((~keep).sum())


@dataclass(slots=True)
class _OpenRow:
    """A row that still has room."""

    tokens: list[NDArray[np.integer]] = field(default_factory=list[NDArray[np.integer]])
    masks: list[Mask] = field(default_factory=list[Mask])
    size: int = 0


class UndividedRows:
    """Feeds one ShardWriter with rows of several documents that do not see each other, none of which is divided: an answer whose row
    began without its prompt would be trained on nothing.

    Each document goes where it leaves the least room, among the last rows that have some (best fit); rows are then nearly full, and
    what is missing is padding. Documents longer than a row are cut, and each piece counts as a document of its own.
    """

    def __init__(self, writer: ShardWriter, data: DataSection) -> None:
        self._writer = writer
        self._limit = data.sequence_length
        self._truncate = data.long_documents == "truncate"
        self._open: list[_OpenRow] = []
        self.dropped: Counter[str] = Counter()

    def state(self) -> dict[str, Any]:
        """The rows that still have room, in their order."""
        rows = [{"tokens": np.concatenate(row.tokens), "masks": np.concatenate(row.masks)} for row in self._open]
        return {"open": rows, "dropped": dict(self.dropped)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._open = [_OpenRow([row["tokens"]], [row["masks"]], int(row["tokens"].size)) for row in state["open"]]
        self.dropped = Counter(state["dropped"])

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far and not dropped."""
        return self._writer.num_tokens + sum(row.size for row in self._open)

    def add(self, tokens: NDArray[np.integer], mask: Mask | None, *, own_row: bool = False) -> None:
        """Take one document, shape [tokens]."""
        del own_row  # none is divided
        assert mask is not None, "rows whose documents do not see each other keep where each begins"
        if tokens.size > self._limit and self._truncate:
            tokens, mask = tokens[: self._limit], mask[: self._limit]
            self.dropped["truncated_documents"] += 1
        for start in range(0, tokens.size, self._limit):
            piece = mask[start : start + self._limit].copy()
            piece[0] = BEGINS_DOCUMENT
            self._place(tokens[start : start + self._limit], piece)

    def _place(self, tokens: NDArray[np.integer], mask: Mask) -> None:
        if not (mask & 1).any():  # a piece of a prompt: nothing would be trained, and nobody sees it
            self.dropped["rows_without_trained_label"] += 1
            return
        fitting = [row for row in self._open if row.size + tokens.size <= self._limit]
        row = max(fitting, key=lambda row: row.size) if fitting else _OpenRow()
        if not fitting:
            self._open.append(row)
        row.tokens.append(tokens)
        row.masks.append(mask)
        row.size += tokens.size
        if row.size == self._limit or len(self._open) > _MOST_OPEN_ROWS:
            self._write(max(self._open, key=lambda row: row.size))

    def finish(self) -> None:
        """Write what is left."""
        for row in list(self._open):
            self._write(row)

    def _write(self, row: _OpenRow) -> None:
        self._open = [other for other in self._open if other is not row]
        _write_trained(self._writer, np.concatenate(row.tokens), np.array([row.size], np.int64), np.concatenate(row.masks))
