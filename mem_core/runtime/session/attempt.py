"""What every part of one attempt of a run is handed: whose run it is, where it is recorded, who is told, who may stop it."""

from dataclasses import dataclass

from mem_core.core.run.goodput import GoodputLedger
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import Noted
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.telemetry.progress import Progress
from mem_core.runtime.session.stop_flag import StopFlag


@dataclass(frozen=True)
class Attempt:
    """One attempt. `request` is what the run was reconciled to, its schedule frozen."""

    request: RuntimeRequest
    environment: EnvironmentReport
    state: StateManager
    progress: Progress
    stop: StopFlag
    ledger: GoodputLedger

    def note(self, text: str) -> None:
        """Say it to people and write it into the journal."""
        self.state.emit(Noted(text=text))
        self.progress.note(text)
