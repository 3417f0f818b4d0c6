"""Figures of held-out rows in passes of bounded size. What does not fit here makes these passes smaller and never the training's."""

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mem_core.domain.errors import InternalError
from mem_core.domain.results.evaluation import SetFigures
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.deepspeed.passes import Passes
from mem_core.runtime.ranks.place import RankPlace
from mem_core.runtime.ranks.worker.classify import memory_kind
from mem_core.runtime.ranks.worker.device import LocalDevice
from mem_core.runtime.ranks.worker.protocol import Answered, AnswerPrompts, Evaluate, Evaluated, WorkerSpec


def spread(num_rows: int, most_rows: int | None) -> np.ndarray:
    """Which of `num_rows` rows are looked at: all of them, or `most_rows` at equal distances from the first on, in order."""
    count = num_rows if most_rows is None else min(num_rows, max(1, most_rows))
    return np.arange(count, dtype=np.int64) * num_rows // max(1, count)


class PromptAnswers:
    """The run's prompts in one rank, over its whole life. Rank 0 answers them; all ranks compute where each holds a part of the weights."""

    def __init__(self, spec: WorkerSpec, place: RankPlace, device: LocalDevice) -> None:
        self._spec, self._place, self._device = spec, place, device
        self._sampling: Any = None

    def answer(self, order: AnswerPrompts, module: torch.nn.Module, most_tokens: int, beat: Callable[[], None]) -> Answered:
        """Both answers to every prompt, from a model in evaluation mode. `beat` is called before each token. Every rank must call it."""
        in_parts = self._spec.request.parallel.zero_stage == 3
        if self._place.rank and not in_parts:
            return Answered(())
        beat()
        self._sampling = self._sampling or self._opened(module, in_step=in_parts and self._place.num_ranks > 1)
        found = self._sampling.run(min(most_tokens, order.most_tokens or most_tokens), beat)
        return Answered(() if self._place.rank else found)

    def _opened(self, module: torch.nn.Module, *, in_step: bool) -> Any:
        """What only prompts need is imported here: runs without them never pay for it."""
        from mem_core.runtime.inference.sampling import PromptSampling

        if self._spec.samples is None:
            raise InternalError("prompts were to be answered and none were given", remedy="Report this as a bug.")
        return PromptSampling(self._spec.samples, module, self._device, in_step=in_step)


class Evaluation:
    """One evaluation by all ranks. `most_tokens` bounds a pass in padded tokens, one row is always allowed."""

    def __init__(self, spec: WorkerSpec, place: RankPlace, passes: Passes, device: LocalDevice, most_tokens: int) -> None:
        self._spec, self._passes, self._device, self._most_tokens = spec, passes, device, most_tokens
        self._rank, self._num_ranks = place.rank, place.num_ranks

    def run(self, order: Evaluate, beat: Callable[[], None]) -> Evaluated:
        """Mean cross-entropy per token and share of right tokens of each set, over every row or an even spread of `order.max_rows`.

        Touches neither gradients nor the random state of training. Every rank must call it.
        """
        if order.most_tokens is not None:
            self._most_tokens = min(self._most_tokens, order.most_tokens)
        figures: dict[str, SetFigures] = {}
        bad: list[str] = []
        for name, folder in self._spec.evaluation_sets.items():
            found = self._set(Path(folder), order.max_rows, beat)
            if math.isfinite(found.loss):
                figures[name] = found
            else:
                bad.append(name)
        return Evaluated(figures, tuple(bad), self._most_tokens)

    def _set(self, folder: Path, max_rows: int | None, beat: Callable[[], None]) -> SetFigures:
        sums = torch.zeros(4, dtype=torch.float64)
        with TokenDataset.open(folder) as data, torch.no_grad():
            batch_size = self._spec.request.training.global_batch_size
            chosen, total = spread(len(data), max_rows), len(data)
            for start in range(0, len(chosen), batch_size):
                beat()
                sums += self._share(data, chosen[start : start + batch_size])
        loss, weight, right, counted = self._over_ranks(sums).tolist()
        mean = loss / weight if weight > 0 else float("nan")
        accuracy = right / counted if counted > 0 else None
        return SetFigures.of(mean, accuracy, tokens=int(weight), rows=len(chosen), rows_total=total)

    def _over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        if self._num_ranks == 1:
            return sums
        on_device = sums.to(self._device.torch_device)
        torch.distributed.all_reduce(on_device)
        return on_device.cpu()

    def _share(self, data: TokenDataset, batch: np.ndarray) -> torch.Tensor:
        """[summed loss, its weight, tokens that are right, tokens that count] of this rank's share of one batch; a rank without rows
        adds nothing."""
        mine = batch[self._rank :: self._num_ranks]
        ids = mine if len(mine) else np.zeros(1, dtype=np.int64)
        loss, right, counted = self._sums(data, ids, self._padded(data, batch))
        sums = torch.tensor([loss, float(self._passes.objective.weight(data, ids)), right, counted], dtype=torch.float64)
        return sums if len(mine) else torch.zeros_like(sums)

    def _padded(self, data: TokenDataset, batch: np.ndarray) -> int:
        """One length for the whole batch, so that all ranks make passes of the same shape."""
        return self._passes.bucket(int(np.asarray(data.lengths[batch]).max()))

    def _sums(self, data: TokenDataset, ids: np.ndarray, length: int) -> tuple[float, float, float]:
        """Sums over rows; halves the passes where one does not fit.

        ZeRO-3 gathers weights in each forward, so there every rank makes the same number of passes: one for each row where the
        bound is below a batch, and a failure is not retried here.
        """
        if self._spec.request.parallel.zero_stage == 3 and self._num_ranks > 1:
            return self._sums_in_step(data, ids, length)
        total, start = np.zeros(3), 0
        while start < len(ids):
            rows = min(max(1, self._most_tokens // length), len(ids) - start)
            try:
                total += self._passes.score(data, ids[start : start + rows], length)
                start += rows
            except Exception as exc:
                if memory_kind(exc) is None or rows == 1:
                    raise
                traceback.clear_frames(exc.__traceback__)  # they hold the activations
                self._most_tokens = rows // 2 * length
                self._device.release_free_memory()
        return float(total[0]), float(total[1]), float(total[2])

    def _sums_in_step(self, data: TokenDataset, ids: np.ndarray, length: int) -> tuple[float, float, float]:
        """As many passes on every rank, those without rows of their own with a row that does not count."""
        share = -(-self._spec.request.training.global_batch_size // self._num_ranks)
        rows = share if share * length <= self._most_tokens else 1
        total = np.zeros(3)
        for start in range(0, share, rows):
            part = ids[start : start + rows]
            found = np.asarray(self._passes.score(data, part if len(part) else ids[:1], length))
            total += found * bool(len(part))
        return float(total[0]), float(total[1]), float(total[2])
