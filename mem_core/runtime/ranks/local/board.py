"""The board of one try: a page shared by supervisor and ranks, for orders that all ranks obey at the same step.

The supervisor sets `order`; only rank 0 reads it, and before its step b it writes `stop_at = b + 1`. Another rank cannot
finish step b before rank 0 has joined that step's collective, so it sees the limit before it could start step b + 1. No
collective, no port, no cost beyond one read of shared memory a step.
"""

import mmap
import struct
from pathlib import Path

_SIZE = 65_536  # orders in front, the ranks' memory readings behind (see memory_board)
_I64 = struct.Struct("<q")
_ORDER, _STOP_AT = 0, 8
NO_ORDER, ORDER_STOP = 0, 1
NO_LIMIT = 2**62


class Board:
    """One shared page. `create` by the supervisor before the ranks open it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)

    @classmethod
    def create(cls, path: Path) -> "Board":
        """A fresh board without orders."""
        with path.open("wb") as file:
            file.write(_I64.pack(NO_ORDER) + _I64.pack(NO_LIMIT) + bytes(_SIZE - 16))
        return cls(path)

    @property
    def page(self) -> mmap.mmap:
        """The shared page itself."""
        return self._map

    def order_stop(self) -> None:
        """Supervisor: end the segment at the next step boundary."""
        _I64.pack_into(self._map, _ORDER, ORDER_STOP)

    def clear(self) -> None:
        """Supervisor, between segments: no order, no limit."""
        _I64.pack_into(self._map, _ORDER, NO_ORDER)
        _I64.pack_into(self._map, _STOP_AT, NO_LIMIT)

    def may_start(self, batch_index: int, rank: int, stop_wanted: bool = False) -> bool:
        """Rank: whether to start this batch. Rank 0 turns an order (or its own wish) into a limit for all.

        With one rank the order acts at once; with more it acts one step later, which all of them share.
        """
        (stop_at,) = _I64.unpack_from(self._map, _STOP_AT)
        if batch_index >= stop_at:
            return False
        if rank == 0 and stop_at == NO_LIMIT and (stop_wanted or self._map[_ORDER] == ORDER_STOP):
            _I64.pack_into(self._map, _STOP_AT, batch_index + 1)
        return True
