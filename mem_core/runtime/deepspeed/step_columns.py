"""Per-step numbers of one segment, kept as plain lists while training and handed over as arrays."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mem_core.runtime.deepspeed.trajectory import Split

SHOWN_SCALES = 24
_DTYPES: dict[str, type] = {
    "batch_index": np.int64,
    "step": np.int64,
    "loss": np.float64,
    "grad_norm": np.float64,
    "lr": np.float64,
    "tokens": np.int64,
    "step_s": np.float32,
    "micro_batches": np.int32,
    "peak_bytes": np.int64,
}


class StepColumns:
    """Columns of equal length, one entry per step. Bounded by the segment length."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, float, float | None, float, int, float, int, int]] = []
        self._splits: list[Split] = []
        self._added: list[float] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, batch_index: int, step: int, loss: float, norm: float | None, lr: float, tokens: int, step_s: float, micro_batches: int,
        peak_bytes: int, split: Split,
    ) -> None:  # fmt: skip
        """Append one step."""
        self._rows.append((batch_index, step, loss, norm, lr, tokens, step_s, micro_batches, peak_bytes))
        self._splits.append(split)

    def add_apart(self, added: float) -> None:
        """What the model added to the last step's loss by itself."""
        self._added.append(added)

    def added(self) -> list[float]:
        """This rank's parts of what the model added; empty where it adds nothing."""
        return self._added

    def replace_added(self, added: list[float]) -> None:
        """Put the sums over all ranks in their place."""
        self._added = added

    def losses(self) -> list[float]:
        """This rank's parts of the losses."""
        return [row[2] for row in self._rows]

    def replace_losses(self, losses: list[float]) -> None:
        """Put the sums over all ranks in their place."""
        self._rows = [(*row[:2], loss, *row[3:]) for row, loss in zip(self._rows, losses, strict=True)]  # type: ignore[misc]

    def trajectory(self) -> Iterator[tuple[int, float, float | None, Split]]:
        """(batch index, loss, gradient norm, split) of each step in order."""
        for row, split in zip(self._rows, self._splits, strict=True):
            yield row[0], row[2], row[3], split

    def arrays(self) -> dict[str, np.ndarray]:
        """Name -> array of one value per step; a missing gradient norm is NaN."""
        columns = list(zip(*self._rows, strict=True)) if self._rows else [() for _ in _DTYPES]
        apart = {"added_loss": np.array(self._added, dtype=np.float64)} if self._added else {}
        return apart | {
            name: np.array([np.nan if value is None else value for value in column], dtype=dtype)
            for (name, dtype), column in zip(_DTYPES.items(), columns, strict=True)
        }


@dataclass
class LossScaleHistory:
    """The changes of the scale in this process, newest last: (batch, scale)."""

    changes: deque[tuple[int, float]] = field(default_factory=lambda: deque[tuple[int, float]](maxlen=SHOWN_SCALES))
    skipped_in_a_row: int = 0

    def add(self, batch_index: int, scale: float | None, *, applied: bool) -> None:
        """After the step of a batch."""
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if scale is not None and (not self.changes or self.changes[-1][1] != scale):
            self.changes.append((batch_index, scale))

    def words(self) -> str:
        """For evidence: where it stood and how it came there."""
        steps = ", ".join(f"{scale:g} after batch {batch}" for batch, scale in self.changes) or "no step was done in this process"
        return f"gradients overflow at the smallest loss scale, after {self.skipped_in_a_row} skipped updates in a row; loss scale: {steps}"
