"""A run on its way from a request to a session: what each opening step adds, and the one way to end it however far it came."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mem_core.core.policy.local_policy_engine import LocalPolicyEngine
from mem_core.core.run.goodput import GoodputLedger
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import MemError
from mem_core.domain.events import AttemptStarted
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.planner.background import BackgroundAdvice
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import Progress as ProgressPort
from mem_core.runtime.data.values import PreparedData
from mem_core.runtime.models.facts import ModelFacts
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.session.remote_service import RemoteService
from mem_core.runtime.session.run_session import RunSession, ending_of
from mem_core.runtime.session.segment_service import StopFlag

T = TypeVar("T")


@dataclass
class RunDraft:
    """A run that is being opened: what each opening task adds to. `progress` and `stop` come from whoever drives it."""

    request: RuntimeRequest
    settings: Settings
    progress: ProgressPort
    stop: StopFlag
    ledger: GoodputLedger
    environment: EnvironmentReport | None = None
    state: StateManager | None = None
    server: ForkServer | None = None
    data: PreparedData | None = None
    model: ModelFacts | None = None
    session: RunSession | None = None
    on_built: str = ""
    policy: LocalPolicyEngine | None = None
    planner: BackgroundAdvice | None = None
    remote: RemoteService | None = None
    allow_reshard: bool = False
    on_converted: Callable[[Path], None] = lambda folder: None  # a port: told of a universal checkpoint before it is used

    def close(self, error: BaseException | None) -> None:
        """End everything that it holds, as far as it was opened; the journal of an opened session says how."""
        if self.session is not None:
            self.session.close(error)
            return
        if self.server is not None:
            self.server.close()
        if self.state is not None:
            self._journal_end(self.state, error)
            self.state.release()
        self.progress.close()

    def _journal_end(self, state: StateManager, error: BaseException | None) -> None:
        """An attempt that ends before it trains has an ending too: without one the next start would take it for a kill."""
        started = any(isinstance(line.event, AttemptStarted) and line.attempt == state.attempt for line in state.lines())
        if error is None or not started:
            return
        try:
            state.fence()
            state.emit(self.ledger.drain())
            state.emit(ending_of(error))
        except MemError as exc:
            self.progress.note(f"the ending could not be recorded: {exc}")


def known(value: T | None) -> T:
    """What an earlier opening step has added."""
    assert value is not None, "opening steps run in order: examine, acquire, prepare"
    return value
