"""`Agreement` of ranks that all stand on one machine: a page of memory that they share with whoever watches them."""

from collections.abc import Callable
from pathlib import Path

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.plan import MemoryPlan
from mem_core.runtime.ranks.agreement import RankReading
from mem_core.runtime.ranks.local.board import Board
from mem_core.runtime.ranks.local.memory_board import MemoryBoard
from mem_core.runtime.ranks.place import RankPlace


class SharedPage:
    """One rank's side: orders in front of the page (`Board`), memory behind them (`MemoryBoard`)."""

    def __init__(self, place: RankPlace, deadline_s: float) -> None:
        """Open the page of `place`, which whoever started the rank has made. `deadline_s` bounds every wait for another rank."""
        self._rank, self._num_ranks, self._deadline_s = place.rank, place.num_ranks, deadline_s
        self._board = Board(Path(place.board_path))
        self._memory = MemoryBoard(self._board.page, place.rank, place.num_ranks)
        self.notice_steps = 1 if place.num_ranks > 1 else 0

    def may_start(self, batch_index: int, *, stop_wanted: bool = False) -> bool:
        """See `Agreement`. One read of shared memory."""
        if stop_wanted and self._num_ranks == 1:
            return False
        return self._board.may_start(batch_index, self._rank, stop_wanted)

    def announce(self, batch_index: int, plan: MemoryPlan) -> None:
        """See `Agreement`."""
        if self._num_ranks > 1:
            self._memory.announce(batch_index, plan)

    def announced(self, batch_index: int) -> tuple[int, MemoryPlan] | None:
        """See `Agreement`."""
        return self._memory.announced(batch_index)

    def agree(self, failed: MicroBatch | None, *, undoable: bool) -> MicroBatch | None:
        """See `Agreement`. Ranks wait here for each other, where they would wait in the reduction anyway."""
        if self._num_ranks == 1 or not undoable:
            return failed
        return self._memory.agree(failed, self._deadline_s)

    def record_first(self, record: Callable[[], None]) -> None:
        """See `Agreement`."""
        if self._rank != 0:
            self._memory.await_acknowledged(self._deadline_s)
            return
        record()
        if self._num_ranks > 1:
            self._memory.withdraw()
            self._memory.acknowledge()

    def share(self, reading: RankReading) -> list[RankReading]:
        """See `Agreement`."""
        if self._num_ranks == 1:
            return [reading]
        self._memory.post_reading(reading)
        return self._memory.readings()
