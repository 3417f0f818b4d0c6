"""The only reader of the ranks' connections: sorts replies, keeps what was saved, notices ends. One thread per group."""

import queue
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait as wait_connections

from mem_core.runtime.ranks.local.processes import ChildProcess
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence, Reply, Saved

EXIT_CODE_LIMIT_S = 2.0


class ReplyPump:
    """`replies` holds (rank, reply) in the order of arrival; (rank, None) says that the rank has ended and will say no more.

    What a dead rank had sent before it died is still delivered, and the others are read on: their words tell whose fault it was.
    """

    def __init__(self, children: Sequence[ChildProcess], name: str) -> None:
        self.replies: queue.Queue[tuple[int, Reply | None]] = queue.Queue()
        self._children = tuple(children)
        self._saved: dict[tuple[int, int], Saved] = {}
        self._evidence: dict[int, ReplayEvidence] = {}
        self._changed = threading.Condition()
        self._dead = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait_saved(self, step: int, num_ranks: int, deadline_s: float) -> list[Saved] | None:
        """Every rank's word that its files of `step` are written, or None where one of them ended before.

        Raises:
            TimeoutError: a writer took too long.
        """
        end = time.monotonic() + deadline_s
        with self._changed:
            while True:
                found = [self._saved.get((step, rank)) for rank in range(num_ranks)]
                complete = [item for item in found if item is not None]
                if len(complete) == num_ranks:
                    return complete
                if self._dead:
                    return None
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"no complete save of step {step} within {deadline_s:.0f} s")
                self._changed.wait(left_s)

    def wait_evidence(self, step: int, deadline_s: float) -> ReplayEvidence | None:
        """Rank 0's word about the first steps after a checkpoint; None where it does not come in time, or never will."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._evidence or self._dead, deadline_s)
            return self._evidence.get(step)

    def close(self) -> None:
        """Stop reading: every rank is gone. Whoever waits for a save is told."""
        self._stopping.set()
        with self._changed:
            self._dead = True
            self._changed.notify_all()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        open_ranks = {rank: child for rank, child in enumerate(self._children)}
        while open_ranks and not self._stopping.is_set():
            handles = {child.connection: rank for rank, child in open_ranks.items()}
            exits = {child.fileno(): rank for rank, child in open_ranks.items()}
            for handle in wait_connections([*handles, *exits], timeout=0.5):
                rank = handles.get(handle) if not isinstance(handle, int) else exits[handle]  # type: ignore[call-overload]
                if rank is None or rank not in open_ranks:
                    continue
                if isinstance(handle, int):
                    if open_ranks[rank].exit_code() is not None and not open_ranks[rank].connection.poll(0):
                        del open_ranks[rank]
                        self._deliver(rank, None)
                elif not self._receive(rank, open_ranks):
                    continue

    def _receive(self, rank: int, open_ranks: dict[int, ChildProcess]) -> bool:
        try:
            reply = open_ranks[rank].connection.recv()
        except (EOFError, OSError):
            child = open_ranks.pop(rank)
            end = time.monotonic() + EXIT_CODE_LIMIT_S
            while child.exit_code() is None and time.monotonic() < end:
                time.sleep(0.005)
            self._deliver(rank, None)
            return False
        self._deliver(rank, reply)
        return True

    def _deliver(self, rank: int, reply: Reply | None) -> None:
        if isinstance(reply, ReplayEvidence):
            with self._changed:
                if rank == 0:  # all ranks say the same
                    self._evidence[reply.step] = reply
                self._changed.notify_all()
            return
        if isinstance(reply, Saved):
            with self._changed:
                self._saved[reply.step, rank] = reply
                self._changed.notify_all()
            return
        if reply is None:
            with self._changed:
                self._dead = True
                self._changed.notify_all()
        self.replies.put((rank, reply))
