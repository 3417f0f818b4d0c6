"""Adaptive memory inside a rank: what plan a batch is split by, and what follows when a forward or backward did not fit."""

import gc
from collections.abc import Callable
from typing import Literal

from mem_core.core.memory_ladder import MicroBatch, PlanBounds, shrink_plan
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.events import MemoryPlanChanged, Noted, OomAbsorbed
from mem_core.domain.plan import MemoryPlan, MemoryPlanChange, plan_at, record_change
from mem_core.runtime.worker.memory_board import MemoryBoard
from mem_core.runtime.worker.protocol import WorkerSpec

RecordEvents = Callable[[tuple[MemoryPlanChanged | OomAbsorbed | Noted, ...]], None]
UNREDUCED_STAGES = (0, 1)  # here backward only accumulates, so gradients may be thrown away and computed again to the bit (I5)


class AdaptiveMemory:
    """One rank's part. Rank 0 decides and records; the others compute or read the same plan.

    `record` returns when the events are durable in the journal: no forward runs under a plan that is not.
    """

    def __init__(self, spec: WorkerSpec, board: MemoryBoard, bounds: PlanBounds, record: RecordEvents) -> None:
        self._spec = spec
        self._board = board
        self._bounds = bounds
        self._record = record
        self.adaptive = spec.request.memory.mode == "adaptive"
        self.retries_in_step = self.adaptive and spec.request.parallel.zero_stage in UNREDUCED_STAGES

    def plan(self, position: TrainingPosition) -> MemoryPlan:
        """The recorded plan of the next batch."""
        return plan_at(position.memory_plan_changes, position.batch_index, self._spec.default_plan)

    def agree(self, failed: MicroBatch | None) -> MicroBatch | None:
        """The largest forward pass that did not fit on any rank in this try, None if all went well.

        Ranks agree through shared memory before the gradients are reduced, where they would wait for each other anyway.
        """
        if self._spec.num_ranks == 1 or not self.retries_in_step:
            return failed
        return self._board.agree(failed, self._spec.deadline_s)

    def absorb(
        self, position: TrainingPosition, failed: MicroBatch, memory: Literal["host", "device"], phase: str, text: str
    ) -> TrainingPosition | None:
        """Record a smaller plan from this batch on; None when no rung that can be taken here is left.

        Called on every rank after `agree` found a failure; all compute the same plan, rank 0 records it before anybody goes on.
        """
        plan = shrink_plan(self.plan(position), self._bounds, failed)
        if plan is None:
            return None
        change = MemoryPlanChange(
            batch_index=position.batch_index,
            plan=plan,
            reason=f"out of {memory} memory in {phase} at {failed.rows} x {failed.length} tokens",
            failed_tokens=failed.tokens,
        )
        if self._spec.rank == 0:
            absorbed = OomAbsorbed(batch_index=position.batch_index, memory=memory, phase=phase, detail=text[:500])
            self._record((MemoryPlanChanged(change=change), absorbed))
            if self._spec.num_ranks > 1:
                self._board.acknowledge()
        else:
            self._board.await_acknowledged(self._spec.deadline_s)
        return with_change(position, change)


def with_change(position: TrainingPosition, change: MemoryPlanChange) -> TrainingPosition:
    """The position with one more recorded change."""
    return position.model_copy(update={"memory_plan_changes": record_change(position.memory_plan_changes, change)})


def release_free_memory(device: str) -> None:
    """Give what is free back to the system: collected objects, the allocator's cache, the C library's free pages."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        return
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc only
        trim(0)
