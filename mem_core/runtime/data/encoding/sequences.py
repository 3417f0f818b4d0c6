"""Tokenised documents to training rows: packed into full sequences, or one document (or chunk) a row."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.request import DataSection
from mem_core.runtime.data.serving.shards import ShardWriter, trained_labels

Mask = NDArray[np.uint8]
_FLUSH_TOKENS = 65_536


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
        self.dropped: Counter[str] = Counter()

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
        if self._waiting and not self._writer.num_rows:
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
        keep = trained_labels(lengths, mask) > 0
        if not keep.all():
            self.dropped["rows_without_trained_label"] += int((~keep).sum())
            kept_tokens = np.repeat(keep, lengths)
            tokens, mask, lengths = tokens[kept_tokens], None if mask is None else mask[kept_tokens], lengths[keep]
        self._writer.write(tokens, lengths, mask)
