"""Forward and backward passes of one rank over its micro-batches. Knows sizes and phases, so that a failure can be named."""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as functional

from mem_core.core.memory.ladder import MicroBatch
from mem_core.runtime.data.serving.collate import Batch, collate
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.splits import padded_length
from mem_core.runtime.deepspeed.engine import Engine

LOSS_IGNORE = -100


class Passes:
    """`phase` and `micro_batch` say what the rank is in, for evidence."""

    def __init__(self, engine: Engine, data: TokenDataset, device: torch.device, sequence_length: int, pad_token_id: int) -> None:
        self._engine = engine
        self._data = data
        self._device = device
        self._pad_token_id = pad_token_id
        self.bucket = partial(padded_length, sequence_length=sequence_length)
        self.phase = "forward"
        self.micro_batch: MicroBatch | None = None
        self.largest = MicroBatch(1, 1)

    def accumulate(self, micro_batches: tuple[tuple[int, ...], ...], ids: np.ndarray, lengths: np.ndarray, scale: float) -> float:
        """Forward and backward over `micro_batches` (positions in the global batch); returns scale × summed loss.

        Gradients are left accumulated in the engine; nothing is reduced at stages 0 and 1.
        """
        total = 0.0
        self.largest = MicroBatch(1, 1)
        for positions in micro_batches:
            rows = np.asarray(positions)
            length = self.bucket(int(lengths[rows].max()))
            self.phase, self.micro_batch = "forward", MicroBatch(len(rows), length)
            if self.micro_batch.tokens > self.largest.tokens:
                self.largest = self.micro_batch
            loss = self.loss(collate(self._data, ids, positions, length, self._pad_token_id)) * scale
            self.phase = "backward"
            self._engine.backward(loss)
            total += float(loss.detach())
        self.phase = "step"
        return total

    def loss(self, batch: Batch) -> torch.Tensor:
        """Summed cross-entropy of a micro-batch over its trained tokens."""
        inputs = {"input_ids": batch.input_ids.to(self._device)}
        if batch.attention_mask is not None:
            inputs["attention_mask"] = batch.attention_mask.to(self._device)
        return summed_loss(self._engine.forward(**inputs), batch.labels.to(self._device))


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [rows, tokens, vocabulary] against unshifted labels [rows, tokens], summed over labels that count."""
    # Labels are moved instead of logits: a slice of the logits would be copied, forward and backward.
    targets = functional.pad(labels[:, 1:], (0, 1), value=LOSS_IGNORE)
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=LOSS_IGNORE, reduction="sum"
    )
