"""What is trained: which labels count, what the loss of some rows is, and what is added to it. Asked here and nowhere else.

Training passes, evaluation and calibration are handed an `Objective` and know neither labels nor cross-entropy. Another objective is
another class with these four methods, chosen in `objective_of`: preferences (DPO) make pairs of rows in `batch` and compare them in
`loss`. Which labels count, and where documents begin that see none before them, was decided when rows were made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.errors import InternalError
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.data.serving.collate import Batch, collate
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.models.router import RouterLoss

IGNORED_LABEL = -100


class ModelOutput(Protocol):
    """What a causal language model returns; `logits` has the shape [rows, tokens, vocabulary].

    Mixtures of experts whose configuration asks for it also give `router_logits`, a layer [rows × tokens, experts].
    """

    logits: torch.Tensor
    router_logits: Sequence[torch.Tensor]


Forward = Callable[..., ModelOutput]
"""The model as an objective calls it: `input_ids` [rows, tokens], and of the same shape `attention_mask` where rows are padded, or
`position_ids` where rows hold documents that do not see each other."""


ForwardToLoss = Callable[..., torch.Tensor]
"""As `Forward`, with labels [rows, tokens] before the keywords; returns their summed cross-entropy."""


@dataclass(frozen=True, slots=True)
class SummedLoss:
    """Of some rows, scalars that can be differentiated: `tokens` is the cross-entropy, `added` what the model adds to it by itself."""

    tokens: torch.Tensor
    added: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        """What is trained on."""
        return self.tokens if self.added is None else self.tokens + self.added


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

    def loss(self, forward: Forward, batch: Batch) -> SummedLoss:
        """Summed loss of a batch on the model's device."""
        ...

    def loss_in_one(self, summed_loss: ForwardToLoss, batch: Batch) -> SummedLoss:
        """The same through a function that computes the loss together with the forward pass."""
        ...


@dataclass(frozen=True)
class NextToken:
    """Each token is predicted from those before it: cross-entropy, summed over the labels that count. `router`: what the model adds to
    it, row by row and weighted by the row's labels that count. `apart`: rows hold documents that do not see each other."""

    pad_token_id: int
    router: RouterLoss | None = None
    apart: bool = False

    def weight(self, data: TokenDataset, ids: NDArray[np.int64]) -> int:
        """Labels that count after the shift, as prepared."""
        return int(np.asarray(data.trained_tokens[ids]).sum())

    def batch(self, data: TokenDataset, ids: NDArray[np.int64], positions: Sequence[int], length: int) -> Batch:
        """Rows padded on the right."""
        return collate(data, ids, positions, length, self.pad_token_id)

    def probe(self, size: MicroBatch, vocabulary: int, device: torch.device) -> Batch:
        """Ascending tokens; a padded row brings a mask, which attention kernels pay for, and so do two documents in a row."""
        tokens = torch.arange(size.tokens, device=device).reshape(size.rows, size.length) % vocabulary
        lengths = (size.length,) * size.rows
        if self.apart:
            places = torch.arange(size.length, device=device) % max(1, size.length // 2)
            return Batch(tokens, None, None, places.expand(size.rows, -1).contiguous(), lengths)
        mask = torch.ones_like(tokens)
        mask[-1, -1] = 0
        return Batch(tokens, None, mask, None, lengths)

    def loss(self, forward: Forward, batch: Batch) -> SummedLoss:
        """The model is never given labels, so that nothing of its own is added unseen."""
        output, labels = forward(**inputs_of(batch)), labels_of(batch)
        tokens = summed_cross_entropy(output.logits, labels)
        if self.router is None:
            return SummedLoss(tokens)
        weights = (labels[:, 1:] != IGNORED_LABEL).sum(dim=1)
        return SummedLoss(tokens, self.router.summed(output.router_logits, batch.real_lengths, weights))

    def loss_in_one(self, summed_loss: ForwardToLoss, batch: Batch) -> SummedLoss:
        """What a model adds by itself cannot be had this way."""
        if self.router is not None:
            raise InternalError("a router's loss was asked of a compiled loss", remedy="Report this as a bug.")
        labels = labels_of(batch)
        if labels is batch.input_ids:  # what is compiled for two tensors is not used for one that comes twice
            labels = labels.clone()
        return SummedLoss(summed_loss(labels, **inputs_of(batch)))


def inputs_of(batch: Batch) -> dict[str, Any]:
    """What the model is called with."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    if batch.attention_mask is not None:
        inputs["attention_mask"] = batch.attention_mask
    if batch.position_ids is not None:  # with a cache, transformers would not look for documents in the positions
        inputs |= {"position_ids": batch.position_ids, "use_cache": False}
    return inputs


def objective_of(request: RuntimeRequest, pad_token_id: int, router: RouterLoss | None = None, *, apart: bool = False) -> Objective:
    """What a request trains. `router`: what its model adds by itself; `apart`: rows hold documents that do not see each other."""
    del request  # every request trains the same way today
    return NextToken(pad_token_id, router, apart)


def pad_token_for(model: torch.nn.Module, wanted: int) -> int:
    """The tokenizer's pad token; token 0 where the model has no embedding for it, since tokenizers bring such tokens along that models
    never had. Nothing sees what stands in padding and no label counts there, but it is looked up all the same."""
    embeddings: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    num_embeddings = getattr(embeddings, "num_embeddings", None)
    return wanted if num_embeddings is None or wanted < num_embeddings else 0


def labels_of(batch: Batch) -> torch.Tensor:
    """Unshifted labels [rows, tokens]: the inputs, and -100 where a token's label does not count."""
    if batch.counted is None:
        return batch.input_ids
    return batch.input_ids.masked_fill(~batch.counted, IGNORED_LABEL)


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [rows, tokens, vocabulary] against unshifted labels [rows, tokens], summed over labels that count."""
    # Labels are moved instead of logits: a slice of the logits would be copied, forward and backward.
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    flat = logits.reshape(-1, logits.shape[-1])
    precise = flat if flat.dtype == torch.float64 else flat.float()
    return functional.cross_entropy(precise, targets.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum")
