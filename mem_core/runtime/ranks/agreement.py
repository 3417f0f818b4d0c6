"""How the ranks of one try agree on a step's orders: whether to begin it, under which memory plan, and whether it went well.

The port that the training loop and adaptive memory are written against. Adapters must pass `mem_core.testing.contracts.agreement_contract`.
Every rank has an `Agreement` of its own and calls the same methods in the same order; calls cost no more than the adapter's way of
sharing does (a read of shared memory, or one small collective in `agree`), since most of them are made at every step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class RankReading:
    """Bytes of one rank: resident (or allocated) now, at the last step's peak, and mapped (or reserved).

    `rows` and `length` are those of the largest forward pass under that peak, 0 where there was none. Ranks have rows of their own and
    post at moments of their own: a peak only means something beside the pass that it belongs to.
    """

    used_bytes: int
    peak_bytes: int
    mapped_bytes: int
    rows: int = 0
    length: int = 0

    @property
    def micro_batch(self) -> MicroBatch:
        """The pass under the peak."""
        return MicroBatch(self.rows, self.length)


class Agreement(Protocol):
    """One rank's voice and ears. A rank begins step b + 1 only after every rank has begun step b: they share its collectives."""

    @property
    def notice_steps(self) -> int:
        """Steps that pass before what rank 0 announces holds on every rank: 0 where there is no other."""
        ...

    def may_start(self, batch_index: int, *, stop_wanted: bool = False) -> bool:
        """Before each batch: whether to begin it. The first False comes at the same batch on every rank.

        An order from outside to end the segment is obeyed within two batches; `stop_wanted` on rank 0 is such an order, on
        others it says nothing. Where there is one rank its wish acts at once.
        """
        ...

    def announce(self, batch_index: int, plan: MemoryPlan) -> None:
        """Rank 0, before its own batch `batch_index - notice_steps`: all follow `plan` from `batch_index` on.

        There is one announcement at a time: the next must wait until rank 0 has done `batch_index`.
        """
        ...

    def announced(self, batch_index: int) -> tuple[int, MemoryPlan] | None:
        """Other ranks, before each batch: the announced plan with its first batch, once `batch_index` has come that far."""
        ...

    def agree(self, failed: MicroBatch | None, *, undoable: bool) -> MicroBatch | None:
        """In each try of a batch, after the last backward pass and before anything is reduced: the largest pass that failed on any
        rank, None if none did. The same answer on every rank.

        `undoable`: gradients may be thrown away and computed again. Where not, a failure ends the try otherwise, and an adapter that
        has nothing else to say gives `failed` back without waiting for anybody.

        Raises:
            TimeoutError: a rank never said how its passes went.
        """
        ...

    def record_first(self, record: Callable[[], None]) -> None:
        """Every rank, after `agree` has told of a failure: rank 0 calls `record`, and nobody returns before it has.

        An announced plan that has not begun is void then.

        Raises:
            TimeoutError: rank 0 never came.
        """
        ...

    def share(self, reading: RankReading) -> list[RankReading]:
        """Tell this rank's bytes; returns what each rank that shares this machine's memory has told last, zeros where it has not yet."""
        ...
