"""Rows to tensors. Worker side: imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mem_core.runtime.data.serving.dataset import TokenDataset


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch.

    `input_ids`: int64 [rows, length]. `counted`: bool of the same shape, False at padding and wherever the row's mask says so, decided
    by position and never by value, so that a real end-of-text token is learnt even where it doubles as the pad token; None when
    every token counts. What that means for labels and loss is the objective's. `attention_mask`: int64, None when no row is padded.
    """

    input_ids: torch.Tensor
    counted: torch.Tensor | None
    attention_mask: torch.Tensor | None

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        counted, mask = self.counted, self.attention_mask
        return Batch(
            self.input_ids.to(device),
            None if counted is None else counted.to(device),
            None if mask is None else mask.to(device),
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
        return Batch(torch.from_numpy(full), None, None)
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
        target[: tokens.size] = True if mask is None else mask != 0
    return Batch(torch.from_numpy(inputs), torch.from_numpy(counted), _attention_mask(rows, shape) if padded else None)


def _attention_mask(rows: Sequence[tuple[NDArray, NDArray | None]], shape: tuple[int, int]) -> torch.Tensor:
    mask = np.zeros(shape, np.int64)
    for target, (tokens, _) in zip(mask, rows, strict=True):
        target[: tokens.size] = 1
    return torch.from_numpy(mask)
