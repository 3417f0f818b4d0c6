"""MLflow: points are sent from the run's own files by a thread, so that a server that is away, slow or broken costs training nothing.

What a server has is written down beside the metrics (`marks.py`): before a batch is sent, how far it goes, and after the answer, that it
is there. Where an answer was lost, the server is asked for the last step that it has. So a resume sends every point once, and a run whose
server came back after hours, or with the next start, has all of them.
"""

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from mem_core.domain.events import Evaluated
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.run import RunStatus
from mem_core.domain.secrets import scrub
from mem_core.infrastructure.storage.redact import redact, redact_url
from mem_core.infrastructure.telemetry.loggers.marks import Mark, read_mark, write_mark
from mem_core.infrastructure.telemetry.loggers.points import Point, points_of_evaluations, points_of_steps
from mem_core.infrastructure.telemetry.metrics import Columns

MARK_NAME = "mlflow.json"
POINTS_OF_A_BATCH = 100  # of ten values: a server takes 1,000 values at once
END_LIMIT_S = 20.0
RETRY_S = (2.0, 5.0, 15.0, 60.0)
TEXT_LIMIT = 400
STATUS = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED", "running": "RUNNING"}
TOKEN_TAG = "mem.token"


class Server(Protocol):
    """What is asked of a tracking server; `mlflow_server.py` speaks to a real one. Every call may raise anything."""

    def begin(self, experiment: str, name: str, token: str, texts: dict[str, str], parameters: dict[str, str]) -> tuple[str, str]:
        """(experiment id, run id) of the run with this token: the one that is there, else a new one."""
        ...

    def send(self, run_id: str, points: Sequence[Point]) -> None:
        """All of them, or an error."""
        ...

    def last_step(self, run_id: str, metric: str) -> int:
        """The last step that it has of a metric; 0 where it has none."""
        ...

    def set_status(self, run_id: str, status: str, texts: dict[str, str]) -> None:
        """How the run stands now."""
        ...


@dataclass(frozen=True)
class MlflowTarget:
    """Where a run's figures go, and as what. `uri` may carry a password and is never shown."""

    uri: str = field(repr=False)
    experiment: str
    run_name: str
    parameters: dict[str, str]
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def shown(self, text: str) -> str:
        """The first line of what a server or its client says, without anything that signs in."""
        passwords = (urlsplit(self.uri).password or "", *self.secrets)
        return redact(scrub(text, passwords)).strip().split("\n", 1)[0][:TEXT_LIMIT]

    def address(self, experiment_id: str, run_id: str) -> str:
        """Where people look at the run."""
        shown = redact_url(self.uri).rstrip("/")
        return f"{shown}/#/experiments/{experiment_id}/runs/{run_id}" if shown.startswith("http") else f"{shown} run {run_id}"


class MlflowLogger:
    """One attempt's connection. `say` tells people and the journal; `on_address` is told once where the run can be looked at."""

    name = "mlflow"

    def __init__(
        self,
        folder: Path,
        target: MlflowTarget,
        connect: Callable[[], Server],
        say: Callable[[str], None],
        on_address: Callable[[str], None] = lambda address: None,
        *,
        retry_s: Sequence[float] = RETRY_S,
        end_limit_s: float = END_LIMIT_S,
    ) -> None:
        self._folder, self._target, self._connect, self._say, self._on_address = folder, target, connect, say, on_address
        self._retry_s, self._end_limit_s = retry_s, end_limit_s
        self._server: Server | None = None
        self._mark = read_mark(folder / MARK_NAME) or Mark(token=uuid.uuid4().hex)
        self._begun = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._done = threading.Event()
        self._ending: tuple[str, dict[str, str]] | None = None
        self._failures = 0
        self._memory_limit_bytes = 0
        self._thread: threading.Thread | None = None

    def rewind(self, step: int) -> None:
        """What the server has stays there: a step that is done again is not sent again."""
        self._look_again()

    def segment(self, to_step: int, columns: Columns, memory_limit_bytes: int) -> None:
        """There is something new in the run's files."""
        self._memory_limit_bytes = memory_limit_bytes
        self._look_again()

    def evaluations(self, evaluations: Sequence[Evaluated]) -> None:
        """There is something new in the run's files."""
        self._look_again()

    def samples(self, samples: Sequence[StepSamples]) -> None:
        """Texts are no figures; the run's own page has them."""

    def end(self, status: RunStatus, texts: dict[str, str]) -> str:
        """Send what is left, within a limit."""
        self._ending = STATUS[status], texts
        self._closing.set()
        self._look_again()
        finished = self._done.wait(self._end_limit_s)
        self._say = lambda text: None  # the run has said its last word
        if finished and not self._failures:
            return ""
        return f"has the steps up to {self._mark.steps_until:,}; the next start of the run sends the rest"

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _look_again(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mem-mlflow", daemon=True)
            self._thread.start()
        self._wake.set()

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ending = self._ending if self._closing.is_set() else None
            try:
                self._catch_up(ending)
            except Exception as exc:  # noqa: BLE001 - whatever a server or its client raises means: not now
                self._failed(exc)
            else:
                self._succeeded()
            if ending is not None:
                self._done.set()
                return
            if self._failures:
                self._closing.wait(self._retry_s[min(self._failures, len(self._retry_s)) - 1])  # an end is not kept waiting
                self._wake.set()

    def _catch_up(self, ending: tuple[str, dict[str, str]] | None) -> None:
        server = self._server = self._server or self._connect()
        if not self._begun:
            self._begin(server)
        self._confirm(server)
        for to_step, points in points_of_steps(self._folder, self._mark.steps_until, self._memory_limit_bytes):
            self._keep(steps_sending=to_step)
            self._send(server, points)
            self._keep(steps_until=to_step)
        evaluated = points_of_evaluations(self._folder, self._mark.evaluated_until)
        if evaluated:
            self._keep(evaluated_sending=evaluated[-1].step)
            self._send(server, evaluated)
            self._keep(evaluated_until=evaluated[-1].step)
        if ending is not None:
            server.set_status(self._mark.run_id, *ending)

    def _begin(self, server: Server) -> None:
        target = self._target
        self._keep()  # the token first: a run that was made and not written down is found by it
        texts = {"mem.run_id": target.run_name}
        experiment_id, run_id = server.begin(target.experiment, target.run_name, self._mark.token, texts, target.parameters)
        self._keep(experiment_id=experiment_id, run_id=run_id, address=target.address(experiment_id, run_id))
        self._begun = True
        self._on_address(self._mark.address)

    def _confirm(self, server: Server) -> None:
        """Where an answer was lost, what was sent may be there."""
        mark = self._mark
        if mark.steps_sending > mark.steps_until:
            self._keep(steps_until=max(mark.steps_until, server.last_step(mark.run_id, "train/loss")))
        if mark.evaluated_sending > mark.evaluated_until:
            points = points_of_evaluations(self._folder, mark.evaluated_until)
            metric = next(iter(points[0].values)) if points else ""
            self._keep(evaluated_until=max(mark.evaluated_until, server.last_step(mark.run_id, metric) if metric else 0))

    def _send(self, server: Server, points: Sequence[Point]) -> None:
        for start in range(0, len(points), POINTS_OF_A_BATCH):
            server.send(self._mark.run_id, points[start : start + POINTS_OF_A_BATCH])

    def _keep(self, **update: Any) -> None:
        self._mark = self._mark.model_copy(update=update)
        write_mark(self._folder / MARK_NAME, self._mark)

    def _failed(self, exc: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            said = self._target.shown(f"{type(exc).__name__}: {exc}")
            self._say(f"MLflow does not take the figures ({said}); training goes on, and they are sent once it does")

    def _succeeded(self) -> None:
        if self._failures:
            self._say(f"MLflow takes figures again and has the steps up to {self._mark.steps_until:,}")
        self._failures = 0
