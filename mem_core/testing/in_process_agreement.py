"""`Agreement` of ranks that are threads of one process, or of a single one: for tests of what a rank does without any file."""

import threading
from collections.abc import Callable

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.plan import MemoryPlan
from mem_core.runtime.ranks.agreement import RankReading


class InProcessTry:
    """What the ranks of one try share. `ranks` are their agreements, `order_stop` is the word from outside."""

    def __init__(self, num_ranks: int, deadline_s: float = 30.0) -> None:
        self.num_ranks = num_ranks
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self.ordered = False
        self.stop_at: int | None = None
        self.plan: tuple[int, MemoryPlan] | None = None
        self.votes: dict[tuple[int, int], MicroBatch | None] = {}
        self.recorded_rounds = 0
        self.readings = [RankReading(0, 0, 0) for _ in range(num_ranks)]
        self.ranks = [InProcessAgreement(self, rank) for rank in range(num_ranks)]

    def order_stop(self) -> None:
        """End the segment at the next batch that all ranks can agree on."""
        with self.changed:
            self.ordered = True

    def wait_for(self, fact: Callable[[], bool], what: str) -> None:
        """With `changed` held: wait until it is so. Raises TimeoutError."""
        if not self.changed.wait_for(fact, self.deadline_s):
            raise TimeoutError(f"{what} within {self.deadline_s} s")


class InProcessAgreement:
    """One rank's side."""

    def __init__(self, shared: InProcessTry, rank: int) -> None:
        self._shared, self._rank, self._round = shared, rank, 0
        self.notice_steps = min(1, shared.num_ranks - 1)

    def may_start(self, batch_index: int, *, stop_wanted: bool = False) -> bool:
        """See `Agreement`."""
        shared = self._shared
        with shared.changed:
            if shared.stop_at is not None and batch_index >= shared.stop_at:
                return False
            if self._rank == 0 and shared.stop_at is None and (stop_wanted or shared.ordered):
                shared.stop_at = batch_index + self.notice_steps
            return shared.stop_at is None or batch_index < shared.stop_at

    def announce(self, batch_index: int, plan: MemoryPlan) -> None:
        """See `Agreement`."""
        with self._shared.changed:
            self._shared.plan = (batch_index, plan)

    def announced(self, batch_index: int) -> tuple[int, MemoryPlan] | None:
        """See `Agreement`."""
        with self._shared.changed:
            plan = self._shared.plan
            return plan if plan is not None and batch_index >= plan[0] else None

    def agree(self, failed: MicroBatch | None, *, undoable: bool) -> MicroBatch | None:
        """See `Agreement`."""
        if not undoable:
            return failed
        shared, self._round = self._shared, self._round + 1
        keys = [(self._round, rank) for rank in range(shared.num_ranks)]
        with shared.changed:
            shared.votes[self._round, self._rank] = failed
            shared.changed.notify_all()
            shared.wait_for(lambda: all(key in shared.votes for key in keys), "not every rank said how its passes went")
            sizes = [size for key in keys if (size := shared.votes[key]) is not None]
        return max(sizes, key=lambda size: size.tokens, default=None)

    def record_first(self, record: Callable[[], None]) -> None:
        """See `Agreement`."""
        shared = self._shared
        if self._rank == 0:
            record()
        with shared.changed:
            if self._rank == 0:
                shared.plan, shared.recorded_rounds = None, self._round
                shared.changed.notify_all()
            shared.wait_for(lambda: shared.recorded_rounds >= self._round, "rank 0 recorded nothing")

    def share(self, reading: RankReading) -> list[RankReading]:
        """See `Agreement`."""
        with self._shared.changed:
            self._shared.readings[self._rank] = reading
            return list(self._shared.readings)
