"""A run on its way from a request to a session, in stages. Each is a frozen value that holds what the one before found out.

    RunOrder   what is asked, and by whom it is driven         nothing is touched
    Examined   the doctor has looked, the policy is built      nothing is touched
    Held       the run folder is ours, heavy imports begin     a lease and a fork server are held
    Prepared   ops and token shards are there, parts wired     a session that can train

`close_stage` ends a run however far it came.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mem_core.core.policy.local_policy_engine import LocalPolicyEngine
from mem_core.core.run.goodput import GoodputLedger
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import MemError
from mem_core.domain.plan import MemoryPlanChange
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.planner.background import BackgroundAdvice
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import NoProgress, Progress
from mem_core.runtime.data.values import PreparedData
from mem_core.runtime.models.facts import ModelFacts
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.session.attempt import Attempt
from mem_core.runtime.session.ending import ended_by
from mem_core.runtime.session.remote_service import RemoteService
from mem_core.runtime.session.run_session import RunSession
from mem_core.runtime.session.stop_flag import StopFlag


@dataclass(frozen=True)
class OpeningOptions:
    """What a driver may add to a request; none of it is part of what the run is.

    `allow_reshard`: the newest checkpoint may be converted to other ranks or another ZeRO stage. `on_built`, a function or its
    "module:function", is called in each rank with its runner once it is built. `on_converted` is told of a universal checkpoint
    before it is used. `server`: somebody's fork server, begun early or shared. `first_plan_changes`: recorded memory plans of
    another run that this one starts with, so that a twin splits its batches in the same way. `store_patience_s`: how long a store that
    goes away under the run is waited for. `person_at_hand`: whether somebody can be asked while it runs. `as_born`: dotted names of
    values that the driver derived and nobody asked for; a run that goes on keeps those of its birth.
    """

    allow_reshard: bool = False
    on_built: str | Callable[[Any], None] = ""
    on_converted: Callable[[Path], None] = lambda folder: None
    server: ForkServer | None = None
    first_plan_changes: tuple[MemoryPlanChange, ...] = ()
    store_patience_s: float = 60.0
    person_at_hand: bool = False
    as_born: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunOrder:
    """A run that is about to be opened. `progress` and `stop` belong to whoever drives it."""

    request: RuntimeRequest
    settings: Settings
    progress: Progress = field(default_factory=NoProgress)
    stop: StopFlag = field(default_factory=StopFlag)
    ledger: GoodputLedger = field(default_factory=GoodputLedger)
    options: OpeningOptions = field(default_factory=OpeningOptions)


@dataclass(frozen=True)
class Examined:
    """The doctor found nothing that stands in the way."""

    order: RunOrder
    environment: EnvironmentReport
    policy: LocalPolicyEngine
    planner: BackgroundAdvice | None


@dataclass(frozen=True)
class Held:
    """The run folder is held. `request` is what the run was born with and the changes that are allowed."""

    examined: Examined
    request: RuntimeRequest
    state: StateManager
    server: ForkServer
    remote: RemoteService | None

    @property
    def order(self) -> RunOrder:
        """What was asked."""
        return self.examined.order

    def attempt(self, request: RuntimeRequest) -> Attempt:
        """What each part of the session is handed; `request` is the one with its schedule frozen."""
        order = self.order
        return Attempt(request, self.examined.environment, self.state, order.progress, order.stop, order.ledger)


@dataclass(frozen=True)
class Prepared:
    """Everything is there; training can begin."""

    held: Held
    data: PreparedData
    model: ModelFacts
    session: RunSession


Stage = RunOrder | Examined | Held | Prepared


def close_stage(stage: Stage, error: BaseException | None) -> None:
    """End everything that is held, as far as the opening came; the journal of a session says how it ended."""
    match stage:
        case Prepared():
            stage.session.close(error)
        case Held():
            stage.server.close()
            with contextlib.suppress(MemError):  # a newer attempt, or a full disk: the run is left all the same
                stage.state.fence()
                stage.state.emit(stage.order.ledger.drain())
                stage.state.emit(ended_by(error))
            if stage.remote is not None:
                stage.remote.close()
            stage.state.release()
            stage.order.progress.close()
        case Examined():
            stage.order.progress.close()
        case RunOrder():
            stage.progress.close()
