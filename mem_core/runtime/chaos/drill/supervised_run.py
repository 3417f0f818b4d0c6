"""The drill's stand-in for an operator: starts a run's command, and starts the same command again when it ended before its time."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mem_core.infrastructure.storage.writing import open_to_append

RESUMABLE_EXIT_CODES = frozenset({-signal.SIGKILL, 75, 73})


@dataclass(frozen=True)
class Ending:
    """How one start of the command ended."""

    exit_code: int
    duration_s: float


@dataclass
class SupervisedRun:
    """One command, started until it says that it is done. Standard output is the run's JSON result, standard error goes to a log.

    Start it from the main thread: the child's parent-death signal is tied to the thread that started it.
    """

    command: list[str]
    environment: dict[str, str]
    log_path: Path
    gate: threading.Lock = field(default_factory=threading.Lock)
    max_starts: int = 50
    endings: list[Ending] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    _child: "subprocess.Popen[bytes] | None" = None

    def flow(self) -> "subprocess.Popen[bytes] | None":
        """The process that drives the run now."""
        return self._child

    def run_to_end(self, on_start: Callable[[], None] = lambda: None) -> int:
        """Until the command completes, or fails in a way that starting it again cannot mend; returns the last exit code."""
        code = 0
        for _ in range(self.max_starts):
            with self.gate:
                self._start()
            on_start()
            code = self._wait()
            if code not in RESUMABLE_EXIT_CODES:
                break
        return code

    def _start(self) -> None:
        with open_to_append(self.log_path) as log:
            self._child = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )

    def _wait(self) -> int:
        assert self._child is not None
        started_s = time.monotonic()
        output, _ = self._child.communicate()
        code = self._child.returncode
        self.endings.append(Ending(code, round(time.monotonic() - started_s, 3)))
        lines = output.decode("utf-8", "replace").strip().splitlines()
        if lines:
            try:
                self.result = json.loads(lines[-1])
            except ValueError:
                self.result = {}
        return code

    def end(self) -> None:
        """End what still runs, at once."""
        child = self._child
        if child is not None and child.poll() is None:
            child.kill()
            child.wait()
