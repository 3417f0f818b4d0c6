"""How often an attempt has failed since something was last proven. Counts only; what follows is the orchestrator's decision."""

from dataclasses import dataclass, field

from mem_core.domain.segment import SegmentFailure, WorkerError


@dataclass
class FailureCount:
    """`without_progress`: failed tries since the validated step last advanced; `saves`: failed saves since then.

    `same_batch`: failures in a row that were of one kind and at one batch. `loads`: by step, failed loads of its checkpoint since any
    checkpoint was last loaded. `same_error`: errors in a row that were of one type, message and phase, each in a process that had
    applied no step; `same_error_batches` are the batches they were met at.
    """

    without_progress: int = 0
    saves: int = 0
    same_batch: int = 0
    loads: dict[int, int] = field(default_factory=dict[int, int])
    same_error: int = 0
    same_error_batches: frozenset[int | None] = frozenset()
    _last: tuple[str, int | None] = ("", None)
    _last_error: tuple[str | None, str] | None = None

    def progressed(self) -> None:
        """A checkpoint has been proven: everything before it is forgiven."""
        self.without_progress = self.saves = self.same_batch = self.same_error = 0
        self.loads.clear()
        self._last_error = None

    def failed(self, failure: SegmentFailure, *, counts: bool) -> None:
        """A try came to nothing. `counts`: against the bound on restarts, unless something else bounds it."""
        self.without_progress += 1 if counts else 0
        at = (failure.kind, failure.evidence.batch_index)
        self.same_batch = self.same_batch + 1 if at == self._last else 1
        self._last = at
        step = failure.evidence.restoring_step
        if step is None:
            self.loads.clear()  # whatever failed came after a load that went well
        else:
            self.loads[step] = self.loads.get(step, 0) + 1
        self._count_error(failure)

    def passed_over(self, step: int) -> None:
        """A checkpoint that cannot be loaded is left out from now on: what it cost says nothing about the run."""
        self.without_progress = max(0, self.without_progress - self.loads.pop(step, 0))

    def _count_error(self, failure: SegmentFailure) -> None:
        lasting = isinstance(failure, WorkerError) and failure.before_any_step
        error = (failure.evidence.phase, failure.evidence.exception) if lasting else None
        again = error is not None and error == self._last_error
        self.same_error = self.same_error + 1 if again else int(lasting)
        self.same_error_batches = (self.same_error_batches if again else frozenset()) | {failure.evidence.batch_index}
        self._last_error = error

    def save_failed(self) -> None:
        """A save came to nothing while the engine stayed sound."""
        self.saves += 1
