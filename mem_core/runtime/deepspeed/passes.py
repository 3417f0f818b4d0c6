"""Forward and backward passes of one rank over its micro-batches. Knows sizes and phases, so that a failure can be named."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.segment import NonFinite, OutOfMemory
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.splits import padded_length
from mem_core.runtime.deepspeed.objective import IGNORED_LABEL, Objective, SummedLoss, labels_of

if TYPE_CHECKING:  # whoever only scores rows has a forward pass of its own, and need not wait for deepspeed
    from mem_core.runtime.deepspeed.engine import Engine


class NonFiniteStep(ArithmeticError):
    """Carries the outcome of a step whose loss or gradient is not finite."""

    def __init__(self, outcome: NonFinite) -> None:
        super().__init__(f"{outcome.what} is not finite at batch {outcome.batch_index}")
        self.outcome = outcome


class OutOfMemoryStep(MemoryError):
    """Carries the outcome of a batch that no smaller plan of this engine lets fit."""

    def __init__(self, outcome: OutOfMemory) -> None:
        super().__init__(outcome.evidence.exception)
        self.outcome = outcome


class Passes:
    """`phase` and `micro_batch` say what the rank is in, for evidence."""

    def __init__(self, engine: "Engine", data: TokenDataset, device: torch.device, sequence_length: int, objective: Objective) -> None:
        self._engine = engine
        self._data = data
        self._device = device
        self.objective = objective
        self.bucket = partial(padded_length, sequence_length=sequence_length)
        self.phase = "forward"
        self.micro_batch: MicroBatch | None = None
        self.largest = MicroBatch(1, 1)
        self.added = 0.0

    def accumulate(self, micro_batches: tuple[tuple[int, ...], ...], ids: np.ndarray, lengths: np.ndarray, scale: float) -> float:
        """Forward and backward over `micro_batches` (positions in the global batch); returns scale × summed loss, without what the
        model adds by itself, which is then in `added`.

        Gradients are left accumulated in the engine; nothing is reduced at stages 0 and 1.
        """
        total = self.added = 0.0
        self.largest = MicroBatch(1, 1)
        for positions in micro_batches:
            rows = np.asarray(positions)
            length = self.bucket(int(lengths[rows].max()))
            self.phase, self.micro_batch = "forward", MicroBatch(len(rows), length)
            if self.micro_batch.tokens > self.largest.tokens:
                self.largest = self.micro_batch
            loss = self.loss(self._data, ids, positions, length)
            self.phase = "backward"
            self._engine.backward(loss.total * scale)
            total += float(loss.tokens.detach() * scale)
            self.added += 0.0 if loss.added is None else float(loss.added.detach() * scale)
        self.phase = "step"
        return total

    def loss(self, data: TokenDataset, ids: np.ndarray, positions: tuple[int, ...], length: int) -> SummedLoss:
        """Summed loss of rows `ids[positions]`, padded to `length` tokens."""
        batch = self.objective.batch(data, ids, positions, length).to(self._device)
        if self._engine.compiled:
            return self.objective.loss_in_one(self._engine.summed_loss, batch)
        return self.objective.loss(self._engine.forward, batch)

    def score(self, data: TokenDataset, ids: np.ndarray, length: int) -> tuple[float, float, float]:
        """(summed loss, tokens that the model puts first and are right, tokens that count) of rows `ids`. Never with gradients."""
        batch = self.objective.batch(data, ids, tuple(range(len(ids))), length).to(self._device)
        seen: list[torch.Tensor] = []

        def forward(**inputs: Any) -> Any:
            output = self._engine.forward(**inputs)
            seen.append(output.logits.detach())
            return output

        loss = self.objective.loss(forward, batch)
        targets = labels_of(batch)[:, 1:]
        counted = targets != IGNORED_LABEL
        right = (seen[0][:, :-1].argmax(dim=-1) == targets) & counted
        return float(loss.tokens), float(right.sum()), float(counted.sum())
