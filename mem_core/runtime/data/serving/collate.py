"""Rows to tensors. Worker side: imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.shards import BEGINS_DOCUMENT, COUNTS


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch.

    `input_ids`: int64 [rows, length]. `counted`: bool of the same shape, False at padding and wherever the row's mask says so, decided
    by position and never by value, so that a real end-of-text token is learnt even where it doubles as the pad token; None when
    every token counts. What that means for labels and loss is the objective's. `attention_mask`: int64, None when no row is padded.
    `position_ids`: int64, where a row holds documents that do not see each other: places in their own document, from 0 on. Then there is
    no attention mask, since that would hide from the model where documents begin; padding stands on the right and is seen by nothing
    before it. `real_lengths`: tokens of each row that are no padding.
    """

    input_ids: torch.Tensor
    counted: torch.Tensor | None
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None = None
    real_lengths: tuple[int, ...] = ()

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        counted, mask, places = self.counted, self.attention_mask, self.position_ids
        return Batch(
            self.input_ids.to(device),
            None if counted is None else counted.to(device),
            None if mask is None else mask.to(device),
            None if places is None else places.to(device),
            self.real_lengths,
        )


def collate(dataset: TokenDataset, ids: NDArray[np.int64], positions: Sequence[int], padded_length: int, pad_token_id: int) -> Batch:
    """The micro-batch of rows `ids[positions]`, padded on the right to `padded_length` tokens.

    The number of counted[:, 1:] is the sum of `dataset.trained_tokens` over these rows.

    Raises:
        ValueError: a row is longer than `padded_length`.
    """
    chosen = ids[list(positions)].tolist()
    full = dataset.full_rows(chosen, padded_length)
    if full is not None:
        return Batch(torch.from_numpy(full), None, None, None, (padded_length,) * len(chosen))
    rows = dataset.rows(chosen)
    shape = (len(rows), padded_length)
    shortest = min(tokens.size for tokens, _ in rows)
    if max(tokens.size for tokens, _ in rows) > padded_length:
        raise ValueError(f"a row of {max(tokens.size for tokens, _ in rows)} tokens does not fit in {padded_length}")
    padded = shortest < padded_length
    inputs = np.full(shape, pad_token_id, np.int64) if padded else np.empty(shape, np.int64)
    for target, (tokens, _) in zip(inputs, rows, strict=True):
        target[: tokens.size] = tokens
    counted = np.zeros(shape, np.bool_)
    for target, (tokens, mask) in zip(counted, rows, strict=True):
        target[: tokens.size] = True if mask is None else mask & COUNTS
    lengths = tuple(tokens.size for tokens, _ in rows)
    tensors = torch.from_numpy(inputs), torch.from_numpy(counted)
    if dataset.index.documents_apart:
        return Batch(*tensors, None, torch.from_numpy(_places([mask for _, mask in rows if mask is not None], padded_length)), lengths)
    return Batch(*tensors, _attention_mask(rows, shape) if padded else None, None, lengths)


def _places(masks: Sequence[NDArray[np.uint8]], length: int) -> NDArray[np.int64]:
    """Places of tokens in their own document, shape [rows, length]; padding counts as one more of them."""
    places = np.empty((len(masks), length), np.int64)
    steps = np.arange(length)
    for target, mask in zip(places, masks, strict=True):
        begins = np.zeros(length, np.bool_)
        begins[: mask.size] = mask & BEGINS_DOCUMENT
        begins[0] = True
        if mask.size < length:
            begins[mask.size] = True
        target[:] = steps - np.maximum.accumulate(np.where(begins, steps, 0))
    return places


def _attention_mask(rows: Sequence[tuple[NDArray, NDArray | None]], shape: tuple[int, int]) -> torch.Tensor:
    mask = np.zeros(shape, np.int64)
    for target, (tokens, _) in zip(mask, rows, strict=True):
        target[: tokens.size] = 1
    return torch.from_numpy(mask)
