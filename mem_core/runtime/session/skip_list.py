"""Batches that are left out for good because the user allows it: recorded before the next try, followed on every resume."""

from pathlib import Path

from mem_core.core.run.state_manager import StateManager
from mem_core.domain.events import BatchSkipped
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.order import sample_ids
from mem_core.runtime.ranks.worker.protocol import WorkerSpec


class SkipList:
    """One for a run, read from its journal."""

    def __init__(self, spec: WorkerSpec, state: StateManager) -> None:
        self._spec = spec
        self._state = state
        self._batches = {line.event.batch_index for line in state.lines() if isinstance(line.event, BatchSkipped)}

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch indices, ascending."""
        return tuple(sorted(self._batches))

    def add(self, batch_index: int, reason: str) -> None:
        """Leave a batch out from now on. Raises StoreUnavailable where that cannot be recorded."""
        self._state.emit(BatchSkipped(batch_index=batch_index, sample_ids=self.samples_of(batch_index), reason=reason[:500]))
        self._batches.add(batch_index)

    def samples_of(self, batch_index: int) -> tuple[int, ...]:
        """Which samples form a batch (I1)."""
        training, section = self._spec.request.training, self._spec.request.data
        with TokenDataset.open(Path(self._spec.data_folder)) as data:
            ids = sample_ids(training.seed, batch_index, training.global_batch_size, data.samples(section))
        return tuple(int(number) for number in ids)
