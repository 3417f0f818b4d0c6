"""What the ranks of one machine tell each other about memory, on the page that they share with the supervisor.

Nothing here is a collective and nothing waits in a step without an out-of-memory, except that ranks which would wait for each
other in the gradient reduction anyway first agree on shared memory that every forward and backward went well.
"""

import mmap
import struct
import time

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.plan import MemoryPlan
from mem_core.runtime.ranks.agreement import RankReading

PAGE_BYTES = 65_536
_PLAN, _ACKNOWLEDGED, _RANKS, _RANK_BYTES = 64, 128, 192, 96
_FIVE = struct.Struct("<qqqqq")
_THREE = struct.Struct("<qqq")
_TWO = struct.Struct("<qq")
_ONE = struct.Struct("<q")
_PASS = 72  # in a rank's slot, behind its bytes and the two rounds of `agree`
MAX_RANKS = (PAGE_BYTES - _RANKS) // _RANK_BYTES
_SPIN_S = 0.0005


class MemoryBoard:
    """The memory part of the shared page. Rank 0 announces plans; each rank posts its readings and how its passes went."""

    def __init__(self, page: mmap.mmap, rank: int, num_ranks: int) -> None:
        assert num_ranks <= MAX_RANKS, "one machine holds far fewer ranks"
        self._map, self._rank, self._num_ranks = page, rank, num_ranks
        self._round = 0

    # -- a plan for all -------------------------------------------------------------------------------------------------

    def announce(self, batch_index: int, plan: MemoryPlan) -> None:
        """Rank 0: all ranks follow `plan` from `batch_index` on.

        To be called before rank 0's own step `batch_index - 1`, which no rank can finish without it. There is one slot, so the
        next announcement must wait until rank 0 has finished step `batch_index`: then every rank has read this one.
        """
        _FIVE.pack_into(
            self._map, _PLAN, 0, plan.micro_batch_rows, plan.micro_batch_tokens,
            int(plan.activation_checkpointing), int(plan.offload_optimizer == "cpu"),
        )  # fmt: skip
        _ONE.pack_into(self._map, _PLAN, batch_index + 1)  # last, so that a half-written plan is never read

    def withdraw(self) -> None:
        """Rank 0, while the others wait for its acknowledgement: an announced plan that has not begun is void."""
        _ONE.pack_into(self._map, _PLAN, 0)

    def announced(self, batch_index: int) -> tuple[int, MemoryPlan] | None:
        """The plan in the slot with its first batch, once `batch_index` has come that far."""
        (mark,) = _ONE.unpack_from(self._map, _PLAN)
        if not mark or batch_index < mark - 1:
            return None
        _, rows, tokens, checkpointing, offload = _FIVE.unpack_from(self._map, _PLAN)
        plan = MemoryPlan(
            micro_batch_rows=rows,
            micro_batch_tokens=tokens,
            activation_checkpointing=bool(checkpointing),
            offload_optimizer="cpu" if offload else "none",
        )
        return mark - 1, plan

    # -- readings -------------------------------------------------------------------------------------------------------

    def post_reading(self, reading: RankReading) -> None:
        """Publish this rank's bytes and the pass that they belong to."""
        mine = self._slot(self._rank)
        _TWO.pack_into(self._map, mine + _PASS, reading.rows, reading.length)
        _THREE.pack_into(self._map, mine, reading.used_bytes, reading.peak_bytes, reading.mapped_bytes)

    def readings(self) -> list[RankReading]:
        """What each rank has published last; zeros where it has not yet."""
        slots = [self._slot(rank) for rank in range(self._num_ranks)]
        return [RankReading(*_THREE.unpack_from(self._map, at), *_TWO.unpack_from(self._map, at + _PASS)) for at in slots]

    # -- did every pass go well? ----------------------------------------------------------------------------------------

    def agree(self, failed: MicroBatch | None, deadline_s: float) -> MicroBatch | None:
        """Wait until every rank has said how its passes went; returns the largest one that failed anywhere, None if none did.

        Every rank calls it once for each try of a batch. Two slots alternate: nobody can write the one after next before all
        have read this one.

        Raises:
            TimeoutError: a rank never said anything.
        """
        self._round += 1
        offset = 24 + 24 * (self._round % 2)
        mine = self._slot(self._rank) + offset
        _ONE.pack_into(self._map, mine + 8, failed.rows if failed else 0)
        _ONE.pack_into(self._map, mine + 16, failed.length if failed else 0)
        _ONE.pack_into(self._map, mine, self._round)
        worst: MicroBatch | None = None
        for rank in range(self._num_ranks):
            theirs = self._slot(rank) + offset
            self._wait(theirs, self._round, deadline_s)
            _, rows, length = _THREE.unpack_from(self._map, theirs)
            if rows and (worst is None or rows * length > worst.tokens):
                worst = MicroBatch(rows, length)
        return worst

    def acknowledge(self) -> None:
        """Rank 0: what the failed round led to is recorded; the others may go on."""
        _ONE.pack_into(self._map, _ACKNOWLEDGED, self._round)

    def await_acknowledged(self, deadline_s: float) -> None:
        """Other ranks: wait for rank 0's `acknowledge` of this round. Raises TimeoutError."""
        self._wait(_ACKNOWLEDGED, self._round, deadline_s)

    def _wait(self, offset: int, value: int, deadline_s: float) -> None:
        started_s = time.monotonic()
        while _ONE.unpack_from(self._map, offset)[0] < value:
            waited_s = time.monotonic() - started_s
            if waited_s > deadline_s:
                raise TimeoutError(f"a rank did not say within {deadline_s:.0f} s how its passes went")
            time.sleep(0 if waited_s < _SPIN_S else 0.0001)

    def _slot(self, rank: int) -> int:
        return _RANKS + _RANK_BYTES * rank
