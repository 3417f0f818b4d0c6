"""Validation loss in passes of bounded size. What does not fit here makes these passes smaller and never the training's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.deepspeed.passes import Passes
from mem_core.runtime.ranks.place import RankPlace
from mem_core.runtime.ranks.worker.classify import memory_kind
from mem_core.runtime.ranks.worker.protocol import Evaluated, WorkerSpec


def spread(num_rows: int, most_rows: int) -> np.ndarray:
    """Which of `num_rows` rows are looked at: all of them, or `most_rows` at equal distances from the first on, in order."""
    count = min(num_rows, max(1, most_rows))
    return np.arange(count, dtype=np.int64) * num_rows // max(1, count)


class Evaluation:
    """One evaluation by all ranks. `most_tokens` bounds a pass in padded tokens, one row is always allowed."""

    def __init__(self, spec: WorkerSpec, place: RankPlace, passes: Passes, device: torch.device, most_tokens: int) -> None:
        self._spec, self._passes, self._device, self._most_tokens = spec, passes, device, most_tokens
        self._rank, self._num_ranks = place.rank, place.num_ranks

    def run(self, max_batches: int, beat: Callable[[], None]) -> Evaluated:
        """Mean cross-entropy per token over every row, or an even spread of as many as `max_batches` global batches hold.

        Touches neither gradients nor the random state of training. Every rank must call it.
        """
        assert self._spec.validation_folder is not None
        sums = torch.zeros(2, dtype=torch.float64)
        with TokenDataset.open(Path(self._spec.validation_folder)) as data, torch.no_grad():
            batch_size = self._spec.request.training.global_batch_size
            chosen, total = spread(len(data), max_batches * batch_size), len(data)
            for start in range(0, len(chosen), batch_size):
                beat()
                sums += self._share(data, chosen[start : start + batch_size])
        if self._num_ranks > 1:
            on_device = sums.to(self._device)
            torch.distributed.all_reduce(on_device)
            sums = on_device.cpu()
        loss = float(sums[0] / sums[1]) if sums[1] > 0 else float("nan")
        return Evaluated(loss, rows=len(chosen), rows_total=total)

    def _share(self, data: TokenDataset, batch: np.ndarray) -> torch.Tensor:
        """[summed loss, trained tokens] of this rank's share of one validation batch; a rank without rows adds nothing."""
        mine = batch[self._rank :: self._num_ranks]
        ids = mine if len(mine) else np.zeros(1, dtype=np.int64)
        weight = 1.0 if len(mine) else 0.0
        loss = self._loss(data, ids, self._padded(data, batch))
        return torch.tensor([loss * weight, float(self._passes.objective.weight(data, ids)) * weight], dtype=torch.float64)

    def _padded(self, data: TokenDataset, batch: np.ndarray) -> int:
        """One length for the whole batch, so that all ranks make passes of the same shape."""
        return self._passes.bucket(int(np.asarray(data.lengths[batch]).max()))

    def _loss(self, data: TokenDataset, ids: np.ndarray, length: int) -> float:
        """Summed loss over rows; halves the passes where one does not fit.

        ZeRO-3 gathers weights in each forward, so there every rank makes the same number of passes: one for each row where the
        bound is below a batch, and a failure is not retried.
        """
        stage3 = self._spec.request.parallel.zero_stage == 3 and self._num_ranks > 1
        share = -(-self._spec.request.training.global_batch_size // self._num_ranks)
        if stage3:
            rows = share if share * length <= self._most_tokens else 1
            passes = [ids[start : start + rows] for start in range(0, share, rows)]
            return sum(self._pass(data, part if len(part) else ids[:1], length) * bool(len(part)) for part in passes)
        total, start = 0.0, 0
        while start < len(ids):
            rows = max(1, self._most_tokens // length)
            try:
                total += self._pass(data, ids[start : start + rows], length)
                start += rows
            except Exception as exc:
                rows = min(rows, len(ids) - start)
                if memory_kind(exc) is None or rows == 1:
                    raise
                self._most_tokens = rows // 2 * length
        return total

    def _pass(self, data: TokenDataset, ids: np.ndarray, length: int) -> float:
        return float(self._passes.loss(data, ids, tuple(range(len(ids))), length).tokens)
