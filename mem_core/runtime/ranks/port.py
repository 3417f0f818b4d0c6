"""Where rank processes live and are watched: the ports that session and proof are written against.

`Ranks` starts the ranks of one try and gives a `RankGroup`, which stands and falls together: one rank fails, all are replaced.
`Helpers` gives single processes beside the driver. `Pulse` is the other end, inside a rank. Adapters must pass
`mem_core.testing.contracts.ranks_contract`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

from mem_core.core.recovery.deadlines import PhaseTimes
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.segment import SegmentFailure
from mem_core.runtime.ranks.worker.protocol import (
    Answered,
    AnswerPrompts,
    Evaluate,
    Evaluated,
    Ready,
    ReplayEvidence,
    Saved,
    SegmentDone,
    Train,
    WorkerSpec,
)

Purpose = Literal["train", "replay", "reshard"]


class GroupFailed(Exception):
    """A rank failed; the whole group is dead by the time this is raised. Carries the classified outcome."""

    def __init__(self, failure: SegmentFailure) -> None:
        super().__init__(failure.kind)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a rank last said. `beat_s` is on the CLOCK_MONOTONIC of the machine that the driver is on; 0 before the first beat.

    `step_s` is the whole last step, the same for ranks that wait for each other; `compute_s` its part before anybody is waited for.
    """

    beat_s: float = 0.0
    batch_index: int = 0
    applied_steps: int = 0
    micro_batches: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    tokens: int = 0
    memory_bytes: int = 0
    step_s: float = 0.0
    peak_bytes: int = 0
    compute_s: float = 0.0
    phase: str = "start"


@dataclass(frozen=True)
class Watch:
    """How one try is watched.

    `on_record` journals what rank 0 asks for in the middle of a command, and returns when that is durable; `memory_limit_bytes` is
    that of all ranks, for evidence; `times` carries what was learned about deadlines from one try to the next.
    """

    purpose: Purpose = "train"
    on_record: Callable[[tuple[Any, ...]], None] = lambda events: None
    memory_limit_bytes: int = 0
    times: PhaseTimes = field(default_factory=PhaseTimes)


class RankGroup(Protocol):
    """The ranks of one try. Orders come from one thread; `wait_saved` and `wait_evidence` may be called from others meanwhile."""

    def restore(self, folder: str | None, position: TrainingPosition, replay_until: int = 0) -> Ready:
        """Build the engines and take a checkpoint's state (None: fresh weights). Raises GroupFailed."""
        ...

    def train(self, order: Train, on_beat: Callable[[list[Heartbeat]], None], stop_wanted: Callable[[], bool]) -> SegmentDone:
        """Train one segment. `on_beat` is called some times a second, `stop_wanted` ends it at the same batch on every rank.

        Raises:
            GroupFailed: as Hung also where `resilience.segment_deadline_s` has passed, however busy the ranks look.
        """
        ...

    def evaluate(self, order: Evaluate, on_beat: Callable[[list[Heartbeat]], None] = lambda beats: None) -> Evaluated:
        """Figures of the held-out rows. `on_beat` is called some times a second; what it raises leaves the ranks in the middle, and they
        are to be ended then. Raises GroupFailed."""
        ...

    def answer_prompts(self, order: AnswerPrompts, on_beat: Callable[[list[Heartbeat]], None] = lambda beats: None) -> Answered:
        """Answers to the prompts of the run. `on_beat` as above. Raises GroupFailed."""
        ...

    def heartbeats(self) -> list[Heartbeat]:
        """What each rank last said, in the order of ranks."""
        ...

    def wait_saved(self, step: int, deadline_s: float) -> list[Saved]:
        """Wait until every rank has written its files of `step`. What a rank said before it died counts.

        Raises:
            GroupFailed: the group ended before. TimeoutError: a writer took too long.
        """
        ...

    def wait_evidence(self, step: int, deadline_s: float) -> ReplayEvidence | None:
        """What the first steps after the checkpoint of `step` came to; None where they are not done within the deadline or ever."""
        ...

    def stop(self) -> None:
        """End every rank and leave nothing of the try behind. Safe to call twice."""
        ...


class Ranks(Protocol):
    """Where the ranks of a run live: one machine or many. Tries of several purposes may stand at the same time."""

    def start(self, spec: WorkerSpec, watch: Watch) -> RankGroup:
        """Begin to start the ranks of a new try; returns at once, the first order waits for them. What earlier, killed drivers left
        of their tries is cleared away.

        Raises:
            EnvironmentUnfit: no process can be started.
        """
        ...

    def close(self) -> None:
        """End what keeps ranks quick to start. Groups have been stopped before; any that is left dies with it."""
        ...


class HelperProcess(Protocol):
    """A process that works for the driver, who talks to it over `connection` alone."""

    connection: Connection

    def wait_forked(self, deadline_s: float) -> int:
        """Wait until it is there; returns its pid. Raises EnvironmentUnfit."""
        ...

    def signal_group(self, number: int) -> None:
        """Send a signal to it and to what it has started; one that is gone is fine."""
        ...

    def close(self) -> None:
        """Forget it."""
        ...


class Helpers(Protocol):
    """Where helper processes come from: beside the driver, with the heavy libraries imported already."""

    def fork(self, entry: str, log_name: str) -> HelperProcess:
        """A process that runs `module:function(connection)`. Raises EnvironmentUnfit."""
        ...


class HelperServer(Helpers, Protocol):
    """`Helpers` that come from one process, which can be made to have something in memory that they are born with."""

    def begin_inside(self, entry: str, order: Any, key: str) -> Connection | None:
        """Have `module:function(connection)` run in that process itself, before whatever is asked for later; it is sent `order` first.
        The connection tells what it says. None where it was asked for `key` before. Raises EnvironmentUnfit."""
        ...

    def replace(self) -> None:
        """End that process, whatever it is in, and start another in its place."""
        ...


class Pulse(Protocol):
    """A rank's sign of life, which whoever watches it reads as a `Heartbeat`. Costs a few microseconds: it is called at every step."""

    def beat(
        self,
        phase: str,
        batch_index: int = 0,
        applied_steps: int = 0,
        micro_batches: int = 0,
        loss: float = 0.0,
        grad_norm: float = 0.0,
        learning_rate: float = 0.0,
        tokens: int = 0,
        memory_bytes: int = 0,
        step_s: float = 0.0,
        peak_bytes: int = 0,
        compute_s: float = 0.0,
    ) -> None:
        """Publish a new record."""
        ...
