"""Units of text to training and validation rows, many at a time, with every bad row remembered."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.errors import RequestError
from mem_core.domain.request import DataSection
from mem_core.runtime.data.encoding.encoders import ChatRefused, Encoder, pieces
from mem_core.runtime.data.encoding.sequences import RowMaker
from mem_core.runtime.data.reading.rows import BadRow
from mem_core.runtime.data.reading.units import Readable, Unit, read_units
from mem_core.runtime.data.values import MAX_BAD_ROWS_KEPT

_BATCH_CHARS = 2**18
_BATCH_UNITS = 512


@dataclass(frozen=True, slots=True)
class Target:
    """Where rows go; `held_out` is None for a list's own rows and a fraction where some are for validation."""

    rows: RowMaker
    validation: RowMaker | None = None
    held_out: float = 0.0


class Tokenizing:
    """Runs files through an encoder into row makers. `is_failing` tells that rows are only checked any more."""

    def __init__(self, encoder: Encoder, data: DataSection, has_mask: bool, vocab_size: int | None) -> None:
        self._encoder = encoder
        self._data = data
        self._has_mask = has_mask
        self._vocab_size = vocab_size
        self._waiting: list[tuple[Unit, RowMaker, str]] = []
        self._waiting_chars = 0
        self._seen_training_unit = False
        self.num_documents = 0
        self.num_bad_rows = 0
        self.bad_rows: list[str] = []
        self.dropped: Counter[str] = Counter()
        self.notes: list[str] = []

    @property
    def is_failing(self) -> bool:
        """Whether the bad rows are already too many for the request."""
        return self.num_bad_rows > (self._data.max_bad_rows if self._data.on_bad_row == "skip" else 0)

    def read(self, file: Readable, target: Target) -> Iterator[int]:
        """Take in a whole file; yields the bytes gone through, so that the caller can report."""
        documents_before, bad_before = self.num_documents, self.num_bad_rows
        for size_bytes, item in read_units(file, self._data):
            if isinstance(item, BadRow):
                self._bad(file.source.path, item)
            elif isinstance(item, Unit):
                self.num_documents += item.first
                self._route(item, file.source.path, target)
            elif file.source.kind == "jsonl":
                self.dropped["blank_lines"] += 1
            yield size_bytes
        if self.num_documents == documents_before and self.num_bad_rows == bad_before:
            self.notes.append(f"{file.source.path} is {'blank' if file.source.size_bytes else 'empty'}")

    def flush(self) -> None:
        """Encode what waits and hand it to the row makers."""
        waiting, self._waiting, self._waiting_chars = self._waiting, [], 0
        plain = [(unit, [*pieces(unit.document.prompt or "")], [*pieces(unit.document.text)]) for unit, _, _ in waiting]
        encoded = iter(
            self._encoder.encode([text for unit, *sides in plain if unit.document.messages is None for side in sides for text in side])
        )
        for (unit, rows, path), (_, prompt, text) in zip(waiting, plain, strict=True):
            if unit.document.messages is not None:
                self._take_chat(unit, rows, path)
            else:
                self._take_text(unit, rows, path, [next(encoded) for _ in prompt], [next(encoded) for _ in text])

    def _route(self, unit: Unit, path: str, target: Target) -> None:
        if self.is_failing:
            return
        held_out = target.validation is not None and self._seen_training_unit and _fraction_of(unit.key) < target.held_out
        self._seen_training_unit = True
        rows = target.validation if held_out and target.validation is not None else target.rows
        self._waiting.append((unit, rows, path))
        self._waiting_chars += len(unit.document.text) + len(unit.document.prompt or "")
        if self._waiting_chars >= _BATCH_CHARS or len(self._waiting) >= _BATCH_UNITS:
            self.flush()

    def _take_chat(self, unit: Unit, rows: RowMaker, path: str) -> None:
        try:
            tokens, mask = self._encoder.encode_chat(unit.document)
        except ChatRefused as refused:
            self._bad(path, BadRow(unit.line, str(refused)))
            return
        end = self._encoder.eos_token_id
        if end is not None and end not in tokens[-2:]:
            tokens, mask = np.append(tokens, np.uint32(end)), np.append(mask, np.uint8(1))
        self._take(unit, rows, path, tokens, mask)

    def _take_text(self, unit: Unit, rows: RowMaker, path: str, prompt: list[NDArray], text: list[NDArray]) -> None:
        prefix = [np.array(self._encoder.prefix, np.uint32)] if unit.first else []
        end = self._encoder.eos_token_id
        suffix = [np.array([end], np.uint32)] if unit.last and end is not None else []
        tokens = np.concatenate([*prefix, *prompt, *text, *suffix])
        mask = np.ones(tokens.size if self._has_mask else 0, np.uint8)
        if unit.document.prompt is not None:
            mask[: sum(part.size for part in (*prefix, *prompt))] = 0
        self._take(unit, rows, path, tokens, mask)

    def _take(self, unit: Unit, rows: RowMaker, path: str, tokens: NDArray[np.uint32], mask: NDArray[np.uint8]) -> None:
        limit = self._data.sequence_length
        if tokens.size > limit and self._data.long_documents == "refuse":
            self._bad(path, BadRow(unit.line, f"longer than data.sequence_length: over {limit} tokens, and data.long_documents is refuse"))
            return
        highest = int(tokens.max()) if tokens.size else 0
        if self._vocab_size is not None and highest >= self._vocab_size:
            raise RequestError(
                f"the tokenizer gives token {highest}, the model has {self._vocab_size} embeddings",
                field="model.source",
                bound=f"token ids below {self._vocab_size}",
                remedy="Use the tokenizer that belongs to the model",
            )
        if tokens.size:
            rows.add(tokens, mask if self._has_mask else None)

    def _bad(self, path: str, row: BadRow) -> None:
        self.num_bad_rows += 1
        if len(self.bad_rows) < MAX_BAD_ROWS_KEPT:
            self.bad_rows.append(f"{path}:{row.line}: {row.reason}")


def _fraction_of(key: bytes) -> float:
    """A number in [0, 1) that depends on the content alone: equal documents always land on the same side."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") / 2**64
