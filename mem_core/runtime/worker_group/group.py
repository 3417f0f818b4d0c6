"""The rank processes of one try: started, watched, interrupted, replaced. Supervision is outside the training processes."""

import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait as wait_connections
from pathlib import Path
from typing import Any

from mem_core.core.deadlines import is_hung, silence_allowed_s
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.segment import Evidence, Hung, SegmentFailure, WorkerLost
from mem_core.infrastructure.cgroups import KillCounter
from mem_core.infrastructure.process_facts import cpu_seconds, tail
from mem_core.runtime.worker.board import Board
from mem_core.runtime.worker.classify import classify_death
from mem_core.runtime.worker.heartbeat import Heartbeat, HeartbeatReader
from mem_core.runtime.worker.protocol import (
    Command,
    Evaluate,
    Evaluated,
    Failed,
    Ready,
    Record,
    Recorded,
    Reply,
    Restore,
    Saved,
    SegmentDone,
    Train,
    WorkerSpec,
)
from mem_core.runtime.worker_group.processes import ChildProcess, ForkServer

ENTRY = "mem_core.runtime.worker.main:rank_main"
POLL_S = 0.05
TERM_GRACE_S = 0.5


class GroupFailed(Exception):
    """A rank failed; the whole group is dead by the time this is raised. Carries the classified outcome."""

    def __init__(self, failure: SegmentFailure) -> None:
        super().__init__(failure.kind)
        self.failure = failure


class WorkerGroup:
    """Rank processes that stand together: one fails, all are replaced."""

    def __init__(
        self,
        server: ForkServer,
        spec: WorkerSpec,
        folder: Path,
        try_number: int,
        hang_factor: float,
        on_record: Callable[[tuple[Any, ...]], None] = lambda events: None,
        memory_limit_bytes: int = 0,
    ) -> None:
        """`on_record` journals what rank 0 asks for in the middle of a command; `memory_limit_bytes` is that of all ranks."""
        self._server = server
        self._folder = folder / f"try-{try_number:04d}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._hang_factor = hang_factor
        self._on_record = on_record
        self._memory_limit_bytes = memory_limit_bytes
        self._kill_counters: list[KillCounter] = []
        self.board = Board.create(self._folder / "board")
        self._replies: queue.Queue[tuple[int, Reply | None]] = queue.Queue()
        self._saved: dict[tuple[int, int], Saved] = {}
        self._changed = threading.Condition()
        self._dead = False
        self.failure: SegmentFailure | None = None
        self._slowest_s: dict[str, float] = {}
        self._cpu_at_beat: dict[int, tuple[float, float]] = {}
        self._children: list[ChildProcess] = []
        self._readers: list[HeartbeatReader] = []
        for rank in range(spec.num_ranks):
            self._start_rank(spec, rank)
        self._pump_thread = threading.Thread(target=self._pump, name=f"worker-group-{try_number}", daemon=True)
        self._pump_thread.start()

    def _start_rank(self, spec: WorkerSpec, rank: int) -> None:
        heartbeat = self._folder / f"rank-{rank}.heartbeat"
        child = self._server.fork(ENTRY, f"rank-{rank}.log")
        child.connection.send(
            replace(
                spec,
                rank=rank,
                rendezvous=str(self._folder / "rendezvous"),
                heartbeat_path=str(heartbeat),
                board_path=str(self._folder / "board"),
            )
        )
        self._children.append(child)
        self._readers.append(HeartbeatReader(heartbeat))

    @property
    def num_ranks(self) -> int:
        """Number of rank processes."""
        return len(self._children)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that have been forked."""
        return [child.pid for child in self._children if child.pid is not None]

    def heartbeats(self) -> list[Heartbeat]:
        """What each rank last said."""
        return [reader.read() for reader in self._readers]

    # -- orders ---------------------------------------------------------------------------------------------------------

    def restore(self, folder: str | None, position: TrainingPosition, replay_until: int = 0) -> Ready:
        """Build the engines and take a checkpoint's state. Raises GroupFailed."""
        replies = self._ask(Restore(folder, position, replay_until))
        self._kill_counters = [KillCounter(pid) for pid in self.pids]
        assert isinstance(replies[0], Ready)
        return replies[0]

    def train(self, order: Train, on_beat: Callable[[list[Heartbeat]], None], stop_wanted: Callable[[], bool]) -> SegmentDone:
        """Train one segment. `on_beat` is called some times a second, `stop_wanted` ends the segment at a step boundary."""
        self.board.clear()

        def each_poll() -> None:
            on_beat(self.heartbeats())
            if stop_wanted():
                self.board.order_stop()

        replies = self._ask(order, each_poll)
        assert isinstance(replies[0], SegmentDone)
        return replies[0]

    def evaluate(self, max_batches: int) -> float:
        """Validation loss per token. Raises GroupFailed."""
        replies = self._ask(Evaluate(max_batches))
        assert isinstance(replies[0], Evaluated)
        return replies[0].loss

    def wait_saved(self, step: int, deadline_s: float) -> list[Saved]:
        """Wait until every rank has written its files of `step`; may be called from another thread.

        Raises:
            GroupFailed: the group died before. TimeoutError: a writer took too long.
        """
        end = time.monotonic() + deadline_s
        with self._changed:
            while True:
                found = [self._saved.get((step, rank)) for rank in range(self.num_ranks)]
                if all(item is not None for item in found):
                    return [item for item in found if item is not None]
                if self._dead:
                    raise GroupFailed(
                        self.failure or WorkerLost(cause="the group ended before its files were written", evidence=Evidence())
                    )
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"no complete save of step {step} within {deadline_s:.0f} s")
                self._changed.wait(left_s)

    def stop(self) -> None:
        """End all ranks: TERM, a grace, KILL; then forget the try's files. Safe to call twice."""
        for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, 5.0)):
            for child in self._children:
                if child.exit_code() is None:
                    child.signal_group(number)
            if self._wait_gone(grace_s):
                break
        with self._changed:
            self._dead = True
            self._changed.notify_all()
        self._pump_thread.join(timeout=5)
        for child in self._children:
            child.close()
        self._children_closed()

    def _children_closed(self) -> None:
        self._children = []
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- watching -------------------------------------------------------------------------------------------------------

    def _ask(self, command: Command, each_poll: Callable[[], None] = lambda: None) -> list[Reply]:
        """Send one command to every rank and wait for every reply, watching for death and silence."""
        for child in self._children:
            try:
                child.connection.send(command)
            except OSError:
                break  # dead already; the watch below says how
        replies: dict[int, Reply] = {}
        asked_s = time.monotonic()
        while len(replies) < self.num_ranks:
            try:
                rank, reply = self._replies.get(timeout=POLL_S)
            except queue.Empty:
                each_poll()
                self._check_silence(asked_s, replies)
                continue
            if reply is None:
                self._fail(self._lost(rank))
            elif isinstance(reply, Failed):
                self._fail(reply.failure)
            elif isinstance(reply, Record):
                self._on_record(reply.events)
                self._children[rank].connection.send(Recorded())
            else:
                replies[rank] = reply
        return [replies[rank] for rank in range(self.num_ranks)]

    def _fail(self, failure: SegmentFailure) -> None:
        """The first failing rank's cause is the group's; everybody else is ended."""
        self.failure = failure
        self.stop()
        raise GroupFailed(failure)

    def _lost(self, rank: int) -> SegmentFailure:
        child = self._children[rank]
        code = child.exit_code()
        beat = self._readers[rank].read()
        name = signal.Signals(-code).name if code is not None and code < 0 else ""
        evidence = Evidence(
            rank=rank,
            phase=beat.phase if beat.phase else None,  # type: ignore[arg-type]
            batch_index=beat.batch_index,
            exit_code=code,
            signal=name,
            peak_bytes=sum(reader.read().peak_bytes for reader in self._readers) or None,
            limit_bytes=self._memory_limit_bytes or None,
            last_lines=tail(child.log_path, 20),
        )
        return classify_death(evidence, oom_kills=sum(counter.kills() for counter in self._kill_counters))

    def _check_silence(self, asked_s: float, replies: dict[int, Reply]) -> None:
        now = time.monotonic()
        for rank, reader in enumerate(self._readers):
            if rank in replies:
                continue
            beat = reader.read()
            phase = beat.phase
            self._slowest_s[phase] = max(self._slowest_s.get(phase, 0.0), beat.step_s)
            last_s = max(beat.beat_s, asked_s)
            silent_s = now - last_s
            allowed_s = silence_allowed_s(phase, self._slowest_s[phase], self._hang_factor)  # type: ignore[arg-type]
            if silent_s < 0.5:
                self._cpu_at_beat[rank] = (last_s, cpu_seconds(self._children[rank].pid))
                continue
            since_s, cpu_s = self._cpu_at_beat.setdefault(rank, (last_s, cpu_seconds(self._children[rank].pid)))
            if since_s != last_s:
                self._cpu_at_beat[rank] = (last_s, cpu_seconds(self._children[rank].pid))
            elif is_hung(silent_s, allowed_s, cpu_seconds(self._children[rank].pid) - cpu_s):
                self._fail(self._hung(rank, beat, silent_s))

    def _hung(self, rank: int, beat: Heartbeat, silent_s: float) -> Hung:
        """Collect the stacks of all ranks before anything is killed."""
        for child in self._children:
            child.signal(signal.SIGUSR1)
        time.sleep(0.2)
        stacks = "\n".join(f"rank {i}:\n" + "\n".join(tail(child.log_path, 40)) for i, child in enumerate(self._children))
        evidence = Evidence(rank=rank, phase=beat.phase, batch_index=beat.batch_index, stacks=stacks[-8000:])  # type: ignore[arg-type]
        return Hung(waited_s=round(silent_s, 2), evidence=evidence)

    def _wait_gone(self, grace_s: float) -> bool:
        end = time.monotonic() + grace_s
        while any(child.exit_code() is None for child in self._children):
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        return True

    def _pump(self) -> None:
        """The only reader of the ranks' connections: sorts replies, notices ends."""
        open_ranks = {rank: child for rank, child in enumerate(self._children)}
        while open_ranks and not self._dead:
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
            end = time.monotonic() + 2.0
            while child.exit_code() is None and time.monotonic() < end:
                time.sleep(0.005)
            self._deliver(rank, None)
            return False
        self._deliver(rank, reply)
        return True

    def _deliver(self, rank: int, reply: Reply | None) -> None:
        if isinstance(reply, Saved):
            with self._changed:
                self._saved[reply.step, rank] = reply
                self._changed.notify_all()
            return
        if reply is None:
            with self._changed:
                self._dead = True
                self._changed.notify_all()
        self._replies.put((rank, reply))
