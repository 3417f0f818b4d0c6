"""The one object that knows which runs this process drives, so that tasks get small names instead of live objects.

`DRIVEN` is all the state that this process keeps outside of a run: the runs it drives by key, what the next flow is given by whoever
calls it (a progress display, a fork server begun early), and the embedded API servers that nobody else can look at.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol, TypeVar

from mem_core import bootstrap
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import InternalError, Interrupted
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.telemetry.progress import Progress
from mem_core.runtime.session.opening.stages import Examined, Held, OpeningOptions, Prepared, RunOrder, Stage, close_stage
from mem_core.runtime.session.run_session import RunSession

ECHO_S = 1.0
S = TypeVar("S", Examined, Held, Prepared)


@dataclass(frozen=True)
class Surroundings:
    """What whoever calls a flow in this process gives it: where progress is shown (None: nowhere), and options of the opening.

    `request`: the one to be run, where the flow's parameter is only what may be stored and shown of it.
    """

    progress: Progress | None = None
    options: OpeningOptions = field(default_factory=OpeningOptions)
    request: RuntimeRequest | None = None


class ApiServer(Protocol):
    """An embedded API server of this process."""

    @property
    def url(self) -> str:
        """Where it answers."""
        ...


class DrivenRun:
    """One attempt: how far it has been opened, and how a signal reaches it. A signal handler itself."""

    def __init__(self, order: RunOrder) -> None:
        self.order = order
        self.stage: Stage = order
        self.waiting_for_a_person = False
        self._first_s: dict[int, float] = {}
        self._raised = False

    @property
    def key(self) -> str:
        """What tasks are called with."""
        return self.order.request.run_id

    @property
    def session(self) -> RunSession:
        """The opened session. Raises InternalError before the run is prepared."""
        return self._at(Prepared, "prepare").session

    def examine(self) -> EnvironmentReport:
        """The doctor's look. Raises MemError where something stands in the way."""
        examined = bootstrap.examine(self.order)
        self.stage = examined
        return examined.environment

    def acquire(self) -> Held:
        """Take the run folder. Raises RunHeld and its kin."""
        held = bootstrap.acquire(self._at(Examined, "examine"))
        self.stage = held
        return held

    def prepare(self) -> Prepared:
        """Ops, token shards, session. Raises DataError and its kin."""
        prepared = bootstrap.prepare(self._at(Held, "acquire"))
        self.stage = prepared
        return prepared

    def _at(self, kind: type[S], before: str) -> S:
        if not isinstance(self.stage, kind):
            raise InternalError(f"run {self.key} is not open yet: {before} comes first", remedy="Call the flow, not its tasks.")
        return self.stage

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Whatever happens in the block, everything that the run holds is ended, and the ending is journaled."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as exc:
            error = exc
            raise
        finally:
            close_stage(self.stage, error)

    # -- stopping -------------------------------------------------------------------------------------------------------

    def __call__(self, number: int, _: FrameType | None) -> None:
        """A signal: the segment ends at the next step and commits. Before there are steps it is obeyed at once.

        The same signal again, later than the echo of the first one, is obeyed at once; a terminal's SIGINT with a runner's SIGTERM
        after it is one wish, not two.
        """
        name, now_s = signal.Signals(number).name, time.monotonic()
        if now_s - self._first_s.setdefault(number, now_s) > ECHO_S:
            raise KeyboardInterrupt(f"second {name}")
        self.order.stop.ask(name)
        if self.at_once and not self._raised:
            self._raised = True
            raise Interrupted(f"stopped by {self.order.stop.by} outside of a segment", remedy="The same command goes on from there.")

    @property
    def at_once(self) -> bool:
        """Whether nothing would notice the stop flag for long, and nothing is lost by leaving."""
        return not isinstance(self.stage, Prepared) or self.waiting_for_a_person

    def ask_to_stop(self, reason: str) -> None:
        """From another thread: stop at the next step; before there are steps and while a person is asked, at once."""
        self.order.stop.ask(reason)
        if self.at_once:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    @contextlib.contextmanager
    def asking_a_person(self) -> Iterator[None]:
        """Within the block a signal is obeyed at once, since nothing looks at the stop flag."""
        self.waiting_for_a_person = True
        try:
            yield
        finally:
            self.waiting_for_a_person = False


class Driven:
    """The runs of this process, and what its next flow is given."""

    def __init__(self) -> None:
        self._runs: dict[str, DrivenRun] = {}
        self._surroundings: Surroundings | None = None
        self.api_servers: list[ApiServer] = []
        self.api_lock = threading.Lock()

    @property
    def surroundings(self) -> Surroundings:
        """What the next flow is given; nothing where nobody said so."""
        return self._surroundings or Surroundings()

    @property
    def has_surroundings(self) -> bool:
        """Whether somebody has said so: then nobody else does."""
        return self._surroundings is not None

    @contextlib.contextmanager
    def surrounded(self, surroundings: Surroundings) -> Iterator[None]:
        """Flows called within the block are given this."""
        before, self._surroundings = self._surroundings, surroundings
        try:
            yield
        finally:
            self._surroundings = before

    def run(self, key: str) -> DrivenRun:
        """The run behind a key. Raises InternalError: a task ran outside of its flow."""
        if key not in self._runs:
            raise InternalError(f"no run {key} is driven by this process", remedy="Call the flow, not its tasks.")
        return self._runs[key]

    @contextlib.contextmanager
    def driving(self, order: RunOrder) -> Iterator[DrivenRun]:
        """Register a run for the length of the block and let SIGTERM and SIGINT reach it.

        Outside the main thread Python allows no handlers; cancel then comes through the flow run's state.
        """
        run = DrivenRun(order)
        self._runs[run.key] = run
        try:
            with _obeying(run):
                yield run
        finally:
            self._runs.pop(run.key, None)


@contextlib.contextmanager
def _obeying(run: DrivenRun) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, run) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


DRIVEN = Driven()


def session_of(key: str) -> RunSession:
    """The opened session behind a key. Raises InternalError."""
    return DRIVEN.run(key).session
