"""`RankGroup` on this machine: rank processes started, watched, interrupted. Supervision is outside the training processes."""

import contextlib
import queue
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.segment import Evidence, Hung, SegmentFailure, WorkerLost
from mem_core.infrastructure.machine.cgroups import KillCounter
from mem_core.infrastructure.machine.process_facts import tail
from mem_core.runtime.ranks.local.board import Board
from mem_core.runtime.ranks.local.first_cause import first_cause, is_echo
from mem_core.runtime.ranks.local.heartbeat import HeartbeatReader
from mem_core.runtime.ranks.local.places import local_place
from mem_core.runtime.ranks.local.processes import ChildProcess, ForkServer
from mem_core.runtime.ranks.local.pump import ReplyPump
from mem_core.runtime.ranks.local.silence import SilenceWatch
from mem_core.runtime.ranks.port import GroupFailed, Heartbeat, Watch
from mem_core.runtime.ranks.worker.classify import classify_death, classify_server_death, with_growth
from mem_core.runtime.ranks.worker.protocol import (
    Answered,
    AnswerPrompts,
    Command,
    Evaluate,
    Evaluated,
    Failed,
    Ready,
    Record,
    Recorded,
    ReplayEvidence,
    Reply,
    Restore,
    Saved,
    SegmentDone,
    Train,
    WorkerSpec,
)

ENTRY = "mem_core.runtime.ranks.worker.main:rank_main"
POLL_S = 0.05
MOST_TRIES = 1_000
TERM_GRACE_S = 0.5
SETTLE_S = 0.5
STACKS_S = 0.2


class WorkerGroup:
    """Rank processes that stand together: one fails, all are ended."""

    def __init__(self, server: ForkServer, spec: WorkerSpec, folder: Path, watch: Watch, entry: str = ENTRY) -> None:
        """`folder` is the try's own and is made here; `entry` is the "module:function" that a rank runs."""
        self._server = server
        self._entry = entry
        self._folder = folder
        _make_folder(self._folder)
        self._on_record = watch.on_record
        self._memory_limit_bytes = watch.memory_limit_bytes
        self._segment_deadline_s = spec.request.resilience.segment_deadline_s
        self._kill_counters: dict[int, KillCounter] = {}
        self.board = Board.create(self._folder / "board")
        self.failure: SegmentFailure | None = None
        self.num_ranks = spec.num_ranks
        self._children: list[ChildProcess] = []
        self._readers: list[HeartbeatReader] = []
        for rank in range(spec.num_ranks):
            self._start_rank(spec, rank)
        self._watch = SilenceWatch(self._readers, watch.times, spec.request.resilience.hang_factor)
        self._pump = ReplyPump(self._children, f"worker-group-{folder.name}")

    def _start_rank(self, spec: WorkerSpec, rank: int) -> None:
        place = local_place(self._folder, spec.device, rank, spec.num_ranks)
        child = self._server.fork(self._entry, f"rank-{rank}.log")
        child.connection.send((spec, place))
        self._children.append(child)
        self._readers.append(HeartbeatReader(Path(place.heartbeat_path)))

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
        assert isinstance(replies[0], Ready)
        return replies[0]

    def train(self, order: Train, on_beat: Callable[[list[Heartbeat]], None], stop_wanted: Callable[[], bool]) -> SegmentDone:
        """Train one segment. `on_beat` is called some times a second, `stop_wanted` ends the segment at a step boundary.

        Raises GroupFailed, as Hung also where `resilience.segment_deadline_s` has passed, however busy the ranks look.
        """
        self.board.clear()
        started_s = time.monotonic()

        def each_poll() -> None:
            on_beat(self.heartbeats())
            if stop_wanted():
                self.board.order_stop()
            if not isinstance(self._segment_deadline_s, str) and time.monotonic() - started_s > self._segment_deadline_s:
                self._fail(self._hung(0, time.monotonic() - started_s))

        replies = self._ask(order, each_poll)
        assert isinstance(replies[0], SegmentDone)
        return replies[0]

    def evaluate(self, order: Evaluate, on_beat: Callable[[list[Heartbeat]], None] = lambda beats: None) -> Evaluated:
        """Figures of the held-out rows. Raises GroupFailed, and what `on_beat` raises."""
        replies = self._ask(order, lambda: on_beat(self.heartbeats()))
        assert isinstance(replies[0], Evaluated)
        return replies[0]

    def answer_prompts(self, order: AnswerPrompts, on_beat: Callable[[list[Heartbeat]], None] = lambda beats: None) -> Answered:
        """Answers to the prompts of the run. Raises GroupFailed, and what `on_beat` raises."""
        replies = self._ask(order, lambda: on_beat(self.heartbeats()))
        assert isinstance(replies[0], Answered)
        return replies[0]

    def wait_saved(self, step: int, deadline_s: float) -> list[Saved]:
        """Wait until every rank has written its files of `step`; may be called from another thread.

        Raises:
            GroupFailed: the group died before. TimeoutError: a writer took too long.
        """
        found = self._pump.wait_saved(step, self.num_ranks, deadline_s)
        if found is None:
            raise GroupFailed(self.failure or WorkerLost(cause="the group ended before its files were written", evidence=Evidence()))
        return found

    def wait_evidence(self, step: int, deadline_s: float) -> ReplayEvidence | None:
        """What the first steps after the checkpoint of `step` came to; None where they are not done within the deadline or ever."""
        return self._pump.wait_evidence(step, deadline_s)

    def stop(self) -> None:
        """End all ranks: TERM, a grace, KILL; then forget the try's files. Safe to call twice.

        A stopped process acts on TERM only when it is continued. A rank that is not forked yet ends by itself when it finds its
        connection closed.
        """
        for numbers, grace_s in (((signal.SIGTERM, signal.SIGCONT), TERM_GRACE_S), ((signal.SIGKILL,), 5.0)):
            for child in self._children:
                if child.exit_code() is None:
                    for number in numbers:
                        child.signal_group(number)
            if self._wait_gone(grace_s):
                break
        self._pump.close()
        for child in self._children:
            child.close()
        self._children = []
        shutil.rmtree(self._folder, ignore_errors=True)
        for folder in (self._folder.parent, self._folder.parent.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()  # the last try takes the empty folders with it

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
                rank, reply = self._pump.replies.get(timeout=POLL_S)
            except queue.Empty:
                each_poll()
                self._follow_groups()
                self._check_silence(asked_s, replies)
                continue
            if reply is None or isinstance(reply, Failed):
                self._fail(self._first_cause(rank, reply))
            elif isinstance(reply, Record):
                self._on_record(reply.events)
                self._children[rank].connection.send(Recorded())
            else:
                replies[rank] = reply
        return [replies[rank] for rank in range(self.num_ranks)]

    def _first_cause(self, rank: int, reply: Failed | None) -> SegmentFailure:
        """A rank that lost its peer often says so before the peer's own end is seen: give the true cause a moment to arrive."""
        failures = [self._lost(rank) if reply is None else reply.failure]
        end = time.monotonic() + SETTLE_S
        while all(is_echo(failure) for failure in failures) and len(failures) < self.num_ranks:
            try:
                other, later = self._pump.replies.get(timeout=max(0.001, end - time.monotonic()))
            except queue.Empty:
                break
            if other != rank and (later is None or isinstance(later, Failed)):
                failures.append(self._lost(other) if later is None else later.failure)
        return first_cause(failures)

    def _fail(self, failure: SegmentFailure) -> None:
        """The first failing rank's cause is the group's; everybody else is ended."""
        self.failure = failure
        self.stop()
        raise GroupFailed(failure)

    def _lost(self, rank: int) -> SegmentFailure:
        child = self._children[rank]
        code = child.exit_code()
        if child.pid is None:  # its log does not exist: what happened stands in the server's
            return classify_server_death(self._server.exit_code(), self._server.last_lines(), rank)
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
        evidence = with_growth(evidence, [reader.steps for reader in self._readers])
        return classify_death(evidence, oom_kills=sum(counter.kills() for counter in self._kill_counters.values()))

    def _follow_groups(self) -> None:
        """Count the kernel's kills from before anything can be killed: a rank may die while it starts."""
        for pid in self.pids:
            if pid in self._kill_counters:
                self._kill_counters[pid].follow()
            else:
                self._kill_counters[pid] = KillCounter(pid)

    def _check_silence(self, asked_s: float, replies: dict[int, Reply]) -> None:
        # A rank that is not forked yet waits for the server's imports: the server's CPU time is its own.
        pids = [child.pid if child.pid is not None else self._server.pid for child in self._children]
        sign = self._watch.look(time.monotonic(), asked_s, pids, replies.keys())
        if sign is not None:
            self._fail(self._hung(sign.rank, sign.silent_s))

    def _hung(self, rank: int, silent_s: float) -> Hung:
        """Collect the stacks of all ranks before anything is killed; a stopped rank is continued, since it could not tell its own."""
        for number in (signal.SIGUSR1, signal.SIGCONT):
            for child in self._children:
                child.signal(number)
        time.sleep(STACKS_S)
        beat = self._readers[rank].read()
        stacks = "\n".join(f"rank {i}:\n" + "\n".join(tail(child.log_path, 40)) for i, child in enumerate(self._children))
        evidence = Evidence(
            rank=rank,
            phase=self._watch.phase(rank),
            batch_index=beat.batch_index,
            stacks=stacks[-8000:],
            last_lines=tail(self._children[rank].log_path, 20),
        )
        return Hung(waited_s=round(silent_s, 2), evidence=evidence)

    def _wait_gone(self, grace_s: float) -> bool:
        end = time.monotonic() + grace_s
        while any(child.exit_code() is None and child.pid is not None for child in self._children):
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        return True


def _make_folder(folder: Path) -> None:
    """With its parents, which a group that ends at this moment may take away between the making of one and the next."""
    for _ in range(MOST_TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
            return
        time.sleep(0.001)
    folder.mkdir(parents=True, exist_ok=True)
