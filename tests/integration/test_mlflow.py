"""Figures in a real MLflow server, a process on loopback: every point once over a kill of the server and a resume of the run."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.commands.inspection.finished import result_if_finished
from mem_core.bootstrap import examine_only
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.loggers.mlflow import MlflowLogger
from mem_core.runtime.session.opening.stages import Prepared

NEEDED = ("mlflow", "flask", "sqlalchemy", "pandas", "huey")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(MISSING), reason=f"no MLflow server was tried: not installed here: {', '.join(MISSING)}"),
]
TRAINING = {"max_steps": 20, "segment_steps": 5, "warmup_steps": 4, "global_batch_size": 4}
PASSWORD = "hunter2hunter2"
Nano = Callable[..., RuntimeRequest]
Drive = Callable[..., RunResult]


@dataclass
class MlflowProcess:
    """A tracking server over one database file."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        arguments = ("--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--host", "127.0.0.1", "--port", str(self.port))
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *arguments, "--workers", "1"],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except OSError:
                assert time.monotonic() < end, (self.folder / "server.log").read_text()[-2000:]
                time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def runs(self) -> list[dict[str, Any]]:
        experiment = self.ask("experiments/get-by-name?experiment_name=mem")["experiment"]["experiment_id"]
        return self.ask("runs/search", {"experiment_ids": [experiment]}).get("runs", [])

    def steps(self, run_id: str, metric: str) -> list[int]:
        found = self.ask(f"metrics/get-history?run_id={run_id}&metric_key={metric}").get("metrics", [])
        return sorted(int(point["step"]) for point in found)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = MlflowProcess(tmp_path_factory.mktemp("mlflow"), port)
    process.start()
    yield process
    process.stop()


def wanted(nano: Nano, max_steps: int) -> RuntimeRequest:
    return nano(
        "logged", training={**TRAINING, "max_steps": max_steps}, evaluation={"every_steps": 10}, telemetry={"loggers": ["mlflow", "csv"]}
    )


def settings(server: MlflowProcess) -> Settings:
    """The address with a user and a password, as people have it in their environment."""
    return Settings.from_environment({**os.environ, "MLFLOW_TRACKING_URI": f"http://somebody:{PASSWORD}@127.0.0.1:{server.port}"})


def mlflow_of(stage: Prepared) -> MlflowLogger:
    found = [logger for logger in stage.session.checkpoints.results._loggers if isinstance(logger, MlflowLogger)]
    return found[0]


def test_every_point_is_there_once_over_a_resume_and_a_server_that_was_killed(
    drive: Drive, nano: Nano, server: MlflowProcess, tmp_path: Path
) -> None:
    first = drive(wanted(nano, 10), settings=settings(server))
    (run,) = server.runs()
    run_id = run["info"]["run_id"]
    assert (run["info"]["status"], run["info"]["run_name"]) == ("FINISHED", "logged")
    assert server.steps(run_id, "train/loss") == list(range(1, 11))
    assert {item["key"]: item["value"] for item in run["data"]["params"]}["training.warmup_steps"] == "4"
    server.stop()
    away = drive(wanted(nano, 15), settings=settings(server), prepared=lambda stage: setattr(mlflow_of(stage), "_end_limit_s", 3.0))
    assert (away.status, away.applied_steps) == ("completed", 15), "a server that is away costs the run nothing"
    assert result_if_finished(tmp_path / "logged", wanted(nano, 15)) is None, "the server lacks figures: the same command sends them"
    server.start()
    again = drive(wanted(nano, 15), settings=settings(server))
    assert again.weights_digest == away.weights_digest
    assert server.steps(run_id, "train/loss") == list(range(1, 16))
    assert result_if_finished(tmp_path / "logged", wanted(nano, 15)) is not None
    last = drive(wanted(nano, 20), settings=settings(server))
    (run,) = server.runs()
    assert (run["info"]["run_id"], run["info"]["status"]) == (run_id, "FINISHED")
    assert server.steps(run_id, "train/loss") == list(range(1, 21))
    assert server.steps(run_id, "evaluation/validation/loss") == [10, 15, 20]
    assert {item["key"]: item["value"] for item in run["data"]["tags"]}["mem.weights_digest"] == last.weights_digest
    assert first.logged_to["mlflow"] == last.logged_to["mlflow"]
    assert last.logged_to["mlflow"].startswith(f"{server.url}/#/experiments/")
    assert last.logged_to["tensorboard"] == str(tmp_path / "logged" / "tensorboard")
    assert last.logged_to["mlflow"] in (tmp_path / "logged" / "report.html").read_text()
    rows = (tmp_path / "logged" / "metrics" / "steps.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(1, 21))]
    told = [line.event.text for line in read_journal(tmp_path / "logged" / "journal") if line.event.event == "noted"]
    assert sum("MLflow does not take the figures" in text for text in told) == 1
    for path in (tmp_path / "logged").rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes(), path


def test_the_digests_are_those_of_a_run_that_logs_nowhere(drive: Drive, nano: Nano, server: MlflowProcess) -> None:
    logged = drive(nano("somewhere", training=TRAINING, telemetry={"loggers": ["mlflow"], "mlflow_tracking_uri": server.url}))
    alone = drive(nano("nowhere", training=TRAINING))
    assert (logged.weights_digest, logged.trajectory_digest) == (alone.weights_digest, alone.trajectory_digest)


def test_nobody_else_is_talked_to() -> None:
    """MLflow's own reports are off in a process of its own, where nothing tells MLflow that it is tested."""
    code = (
        "from mem_core.infrastructure.telemetry.loggers.mlflow_server import MlflowServer; MlflowServer('http://127.0.0.1:1'); "
        "from mlflow.telemetry.client import get_telemetry_client; print(get_telemetry_client())"
    )
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "None"


def test_the_doctor_refuses_mlflow_without_an_address(nano: Nano, tmp_path: Path) -> None:
    bare = Settings.from_environment({name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")})
    error = error_of(examine_only(nano("nobody", telemetry={"loggers": ["mlflow"]}), bare))
    assert isinstance(error, RequestError)
    assert "MLFLOW_TRACKING_URI" in str(error.remedy)
