"""What an injector may use: the run seen from outside, the process that is supervised, and bounded waiting."""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from mem_core.runtime.chaos.faults.journal_tail import JournalTail
from mem_core.runtime.chaos.faults.store_relay import StoreRelay
from mem_core.runtime.chaos.faults.view import RunView, SeenProcess, Sign, process_state
from mem_core.runtime.chaos.plan.plan import PlannedFault

T = TypeVar("T")


class NotNow(Exception):
    """The run is not in a state in which this fault can strike; it is tried again a moment later."""


class NotProven(Exception):
    """The fault was injected and nothing outside shows that it fired."""


class HostilePlanner(Protocol):
    """A planner endpoint that can be told to misbehave."""

    def misbehave(self, choice: int) -> str:
        """Make the next reply hostile; returns what it will be."""
        ...

    def wait_served(self, limit_s: float) -> bool:
        """Whether the hostile reply was handed out within the limit."""
        ...


@dataclass(frozen=True)
class Strike:
    """A fault that fired. `struck_s` is CLOCK_MONOTONIC at the blow, `lifted_s` when what was disturbed was given back."""

    struck_s: float
    proof: str
    lifted_s: float | None = None


@dataclass
class Scene:
    """Everything around one run under chaos. `gate` is held by whoever must not see the flow restarted meanwhile."""

    view: RunView
    journal: JournalTail
    flow: Callable[[], "subprocess.Popen[bytes] | None"]
    op_folder: Path
    outage_s: float = 5.0
    own_disk: bool = False
    planner: HostilePlanner | None = None
    relay: StoreRelay | None = None
    gate: threading.Lock = field(default_factory=threading.Lock)

    def training(self) -> Sign:
        """The newest sign of steps being done.

        Raises:
            NotNow: there is none at this moment.
        """
        sign = self.view.sign()
        if sign is None or sign.beat.phase != "step" or time.monotonic() - sign.beat.beat_s > 1.0:
            raise NotNow("no steps are being done")
        return sign

    def one(self, role: str, rng: random.Random) -> SeenProcess:
        """One living process of a role. Raises NotNow."""
        found = self.view.find(role)
        if not found:
            raise NotNow(f"no {role} is alive")
        return rng.choice(found)

    def kill(self, process: SeenProcess, number: int = signal.SIGKILL, limit_s: float = 10.0) -> float:
        """Signal and wait until the very process is gone; returns the moment of the blow.

        Raises:
            NotNow: it was gone before. NotProven: it is still there after the limit.
        """
        if not process.alive():
            raise NotNow(f"{process.role} is gone")
        struck_s = time.monotonic()
        try:
            os.kill(process.pid, number)
        except ProcessLookupError as exc:
            raise NotNow(f"{process.role} is gone") from exc
        if not wait_for(lambda: not process.alive(), limit_s):
            raise NotProven(f"{process.role} (pid {process.pid}) outlived {signal.Signals(number).name}")
        return struck_s

    def kill_flow(self, number: int = signal.SIGKILL) -> tuple[float, int]:
        """Signal the supervised flow and wait for its end; returns the moment of the blow and the exit code.

        Raises:
            NotNow: it does not drive the run at this moment. NotProven: it did not end.
        """
        child = self.flow()
        found = self.view.find("flow")
        if child is None or child.poll() is not None or not found or found[0].pid != child.pid:
            raise NotNow("the flow does not drive the run")
        struck_s = self.kill(found[0], number, limit_s=120.0)
        if not wait_for(lambda: child.poll() is not None, 5.0):
            raise NotProven("the flow's exit code never came")
        return struck_s, int(child.poll() or 0)

    def stop_process(self, process: SeenProcess) -> None:
        """SIGSTOP, seen in /proc. Raises NotNow, NotProven."""
        if not process.alive():
            raise NotNow(f"{process.role} is gone")
        os.kill(process.pid, signal.SIGSTOP)
        if not wait_for(lambda: process_state(process.pid) == "T", 2.0):
            raise NotProven(f"{process.role} (pid {process.pid}) was not seen in state T")


Injector = Callable[[Scene, PlannedFault, random.Random], Strike]


def wait_for(condition: Callable[[], T], limit_s: float, poll_s: float = 0.002) -> T | None:
    """The first true value of `condition`, or None after the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(poll_s)
    return None
