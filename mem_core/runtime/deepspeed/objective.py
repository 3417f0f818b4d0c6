"""What is trained: which labels count, what the loss of some rows is, and what is added to it. Asked here and nowhere else.

Training passes, evaluation and calibration are handed an `Objective` and know neither labels nor cross-entropy. Another objective is
another class with these four methods, chosen in `objective_of`: loss on the assistant's turns only changes `labels_of`'s input, a
router's loss is read from the model's output in `loss`, preferences (DPO) make pairs of rows in `batch` and compare them in `loss`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.data.serving.collate import Batch, collate
from mem_core.runtime.data.serving.dataset import TokenDataset

IGNORED_LABEL = -100


class ModelOutput(Protocol):
    """What a causal language model returns; `logits` has the shape [rows, tokens, vocabulary]."""

    logits: torch.Tensor


Forward = Callable[..., ModelOutput]
"""The model as an objective calls it: `input_ids` [rows, tokens], and `attention_mask` of the same shape where rows are padded."""


class Objective(Protocol):
    """One way to train. The losses of the parts of a global batch add up to its loss, whatever the parts are (I1)."""

    def weight(self, data: TokenDataset, ids: NDArray[np.int64]) -> int:
        """What the summed loss of these rows is divided by; of a whole global batch it is known before its first forward."""
        ...

    def batch(self, data: TokenDataset, ids: NDArray[np.int64], positions: Sequence[int], length: int) -> Batch:
        """Rows `ids[positions]`, padded to `length` tokens, on the CPU."""
        ...

    def probe(self, size: MicroBatch, vocabulary: int, device: torch.device) -> Batch:
        """Made-up rows that need as much memory as real ones of this size."""
        ...

    def loss(self, forward: Forward, batch: Batch) -> torch.Tensor:
        """Summed loss of a batch on the model's device, a scalar that can be differentiated."""
        ...


@dataclass(frozen=True)
class NextToken:
    """Each token is predicted from those before it: cross-entropy, summed over the labels that count. Nothing is added."""

    pad_token_id: int

    def weight(self, data: TokenDataset, ids: NDArray[np.int64]) -> int:
        """Labels that count after the shift, as prepared."""
        return int(np.asarray(data.trained_tokens[ids]).sum())

    def batch(self, data: TokenDataset, ids: NDArray[np.int64], positions: Sequence[int], length: int) -> Batch:
        """Rows padded on the right."""
        return collate(data, ids, positions, length, self.pad_token_id)

    def probe(self, size: MicroBatch, vocabulary: int, device: torch.device) -> Batch:
        """Ascending tokens; a padded row brings a mask, which attention kernels pay for."""
        tokens = torch.arange(size.tokens, device=device).reshape(size.rows, size.length) % vocabulary
        mask = torch.ones_like(tokens)
        mask[-1, -1] = 0
        return Batch(tokens, None, mask)

    def loss(self, forward: Forward, batch: Batch) -> torch.Tensor:
        """Summed cross-entropy; the model is never given labels, so that nothing of its own is added unseen."""
        inputs = {"input_ids": batch.input_ids}
        if batch.attention_mask is not None:
            inputs["attention_mask"] = batch.attention_mask
        return summed_cross_entropy(forward(**inputs).logits, labels_of(batch))


def objective_of(request: RuntimeRequest, pad_token_id: int) -> Objective:
    """What a request trains."""
    del request  # every request trains the same way today
    return NextToken(pad_token_id)


def labels_of(batch: Batch) -> torch.Tensor:
    """Unshifted labels [rows, tokens]: the inputs, and -100 where a token's label does not count."""
    if batch.counted is None:
        return batch.input_ids
    return batch.input_ids.masked_fill(~batch.counted, IGNORED_LABEL)


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [rows, tokens, vocabulary] against unshifted labels [rows, tokens], summed over labels that count."""
    # Labels are moved instead of logits: a slice of the logits would be copied, forward and backward.
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum"
    )
