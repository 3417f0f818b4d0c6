"""Everyone who takes a run's figures, behind the few moments at which there are any. What one of them cannot do is said, never raised."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from mem_core.domain.errors import MemError, RequestError
from mem_core.domain.events import Evaluated, FiguresLogged, Noted
from mem_core.domain.request import RuntimeRequest, shown_request
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.run import RunStatus
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.redact import redact_url
from mem_core.infrastructure.telemetry.loggers.csv_tables import STEPS_NAME, CsvLogger
from mem_core.infrastructure.telemetry.loggers.files import NpzLogger, TensorBoardLogger
from mem_core.infrastructure.telemetry.loggers.mlflow import MlflowLogger, MlflowTarget
from mem_core.infrastructure.telemetry.loggers.mlflow_server import MlflowServer
from mem_core.infrastructure.telemetry.loggers.port import ResultLogger
from mem_core.infrastructure.telemetry.metrics import Columns
from mem_core.infrastructure.telemetry.tensorboard import TensorBoardWriter
from mem_core.runtime.session.attempt import Attempt


class ResultLog:
    """The loggers of one attempt, in the order in which they are told: the run's own files first, which the others read."""

    def __init__(self, loggers: Sequence[ResultLogger], say: Callable[[str], object]) -> None:
        self._loggers, self._say = tuple(loggers), say

    def rewind(self, step: int) -> None:
        """Work goes on from `step`."""
        for logger in self._loggers:
            with self._never_fatal(logger, f"rows beyond step {step} could not be removed"):
                logger.rewind(step)

    def segment(self, to_step: int, columns: Columns, memory_limit_bytes: int) -> None:
        """A segment was committed."""
        for logger in self._loggers:
            with self._never_fatal(logger, f"metrics of step {to_step} could not be written"):
                logger.segment(to_step, columns, memory_limit_bytes)

    def evaluations(self, evaluations: Sequence[Evaluated]) -> None:
        """Held-out rows were looked at."""
        for logger in self._loggers:
            with self._never_fatal(logger, "figures of held-out rows could not be written"):
                logger.evaluations(evaluations)

    def samples(self, samples: Sequence[StepSamples]) -> None:
        """Prompts were answered."""
        for logger in self._loggers:
            with self._never_fatal(logger, "answers to prompts could not be written"):
                logger.samples(samples)

    def end(self, status: RunStatus, texts: dict[str, str]) -> None:
        """The attempt is over."""
        for logger in self._loggers:
            missing = logger.end(status, texts)
            if missing:
                self._say(f"{logger.name} {missing}")

    @contextmanager
    def _never_fatal(self, logger: ResultLogger, problem: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self._say(f"{problem} ({logger.name}): {exc}")


def files_alone(run_folder: Path, say: Callable[[str], object]) -> ResultLog:
    """What every run has."""
    return ResultLog(_own_files(run_folder), say)


def result_log(attempt: Attempt, settings: Settings) -> ResultLog:
    """Everyone whom the request asks for. Journals where their figures can be looked at; nobody is connected to yet."""
    folder, request = attempt.state.folder, attempt.request
    loggers = _own_files(folder)
    attempt.state.emit(FiguresLogged(logger="tensorboard", address=str((folder / "tensorboard").absolute())))
    if "csv" in request.telemetry.loggers:
        loggers.append(CsvLogger(folder / "metrics"))
        attempt.state.emit(FiguresLogged(logger="csv", address=str((folder / "metrics" / STEPS_NAME).absolute())))
    if "mlflow" in request.telemetry.loggers:
        loggers.append(_mlflow(attempt, settings))
    return ResultLog(loggers, _quietly(attempt))


def logging_problems(request: RuntimeRequest, settings: Settings) -> tuple[MemError, ...]:
    """Why a logger that is asked for could not even be tried, for the doctor."""
    if "mlflow" not in request.telemetry.loggers or tracking_uri(request, settings):
        return ()
    return (
        RequestError(
            "there is no MLflow server to send figures to", field="telemetry.mlflow_tracking_uri", value="null", bound="an address",
            remedy="Set it, or MLFLOW_TRACKING_URI in the environment, or leave mlflow out of telemetry.loggers.",
        ),
    )  # fmt: skip


def tracking_uri(request: RuntimeRequest, settings: Settings) -> str:
    """The request's, else that of the environment; empty where neither names one."""
    return request.telemetry.mlflow_tracking_uri or settings.mlflow_tracking_uri or ""


def _own_files(folder: Path) -> list[ResultLogger]:
    return [NpzLogger(folder / "metrics"), TensorBoardLogger(TensorBoardWriter(folder))]


def _mlflow(attempt: Attempt, settings: Settings) -> MlflowLogger:
    request, uri = attempt.request, tracking_uri(attempt.request, settings)
    target = MlflowTarget(uri, request.telemetry.mlflow_experiment, request.run_id, parameters_of(request), settings.mlflow_secrets)
    say = _quietly(attempt)

    def told(address: str) -> None:
        with suppress(MemError):
            attempt.state.emit(FiguresLogged(logger="mlflow", address=redact_url_of_page(address)))

    return MlflowLogger(attempt.state.folder / "metrics", target, lambda: MlflowServer(uri), say, told)


def redact_url_of_page(address: str) -> str:
    """The address of a page of a server: its part behind the # is no secret."""
    url, mark, page = address.partition("#")
    return f"{redact_url(url)}{mark}{page}"


def parameters_of(request: RuntimeRequest) -> dict[str, str]:
    """Every field of a request by its dotted name, as a server keeps parameters."""
    return dict(_flat(shown_request(request).model_dump(mode="json"), ""))


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _quietly(attempt: Attempt) -> Callable[[str], None]:
    """Into the journal and to people, from any thread; a journal that takes no line now is no reason to stop anything."""

    def say(text: str) -> None:
        with suppress(MemError, OSError):
            attempt.state.emit(Noted(text=text))
        attempt.progress.note(text)

    return say
