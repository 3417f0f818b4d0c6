"""A Prefect server, `mem serve` and process workers as real processes, and what tests ask of them."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from flows.server.embedded import EmbeddedServer
from mem_core.infrastructure.settings import Settings

BIN = Path(sys.executable).parent
START_LIMIT_S = 300.0
FINAL = {"Completed", "Failed", "Cancelled", "Crashed"}


class Site:
    """Started processes, and the API over plain HTTP, so that a test never shares code with what it looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port: int | None = None
        self._server: EmbeddedServer | None = None
        self.serving: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, serving: bool = True) -> "Iterator[Site]":
        """Server and, if wanted, `mem serve`; both are gone afterwards."""
        site = cls(folder)
        try:
            site.start_server()
            if serving:
                site.start_serving()
            yield site
        finally:
            site.close()

    def start_serving(self) -> None:
        """`mem serve`, until it says so."""
        self.serving = self.start(BIN / "mem", "serve", log="serve.log")
        self.wait_log("serve.log", "Ctrl-C stops")

    def start_server(self) -> None:
        """On the same port and database as before."""
        settings = dataclasses.replace(Settings.from_environment(), prefect_api_url=None)
        self._server = EmbeddedServer.start(settings, str(self.folder), port=self._port, ui=True)
        self._port = self._server.port
        self._server.wait_ready()

    @property
    def url(self) -> str:
        """Of the API; the same after the server was started again."""
        return f"http://127.0.0.1:{self._port}/api"

    @property
    def database(self) -> Path:
        """Of the server."""
        assert self._server is not None
        return self._server.database

    def kill_server(self) -> None:
        """As a power cut would."""
        assert self._server is not None
        os.kill(self._server.pid, signal.SIGKILL)
        self._server.close()

    def close(self) -> None:
        """End what still runs."""
        if self.serving is not None and self.serving.poll() is None:
            self.serving.send_signal(signal.SIGTERM)
            try:
                self.serving.wait(60)
            except subprocess.TimeoutExpired:  # whether it stops in time is tested elsewhere; here nothing may be left
                os.killpg(self.serving.pid, signal.SIGKILL)
                self.serving.wait()
        if self._server is not None:
            self._server.close()

    @property
    def environment(self) -> dict[str, str]:
        """A clean shell with the server's address."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
            "PREFECT_API_URL": self.url,
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        }

    def start(self, program: Path, *arguments: str, log: str) -> "subprocess.Popen[bytes]":
        """A process of its own session, its output in a file of the site's folder."""
        with (self.folder / log).open("wb") as file:
            return subprocess.Popen(
                [str(program), *arguments],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait_log(self, log: str, text: str) -> None:
        """Until a log says something."""
        wait_for(lambda: text in (self.folder / log).read_text(errors="replace"), f"{text!r} in {log}", START_LIMIT_S)

    def prefect(self, *arguments: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """The `prefect` command in a clean shell."""
        return subprocess.run(
            [str(BIN / "prefect"), "--no-prompt", *arguments],
            env={**self.environment, "COLUMNS": "400"},
            cwd=folder or self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    # -- the API ----------------------------------------------------------------------------------------------------------

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """One call."""
        return self._call("POST", path, json=body)

    def patch(self, path: str, body: dict[str, Any]) -> None:
        """One call."""
        self._call("PATCH", path, json=body)

    def get(self, path: str) -> Any:
        """One call."""
        return self._call("GET", path)

    def _call(self, method: str, path: str, **body: Any) -> Any:
        """SQLite is locked now and then on a busy machine: the server then says 503, and its own clients try again too.

        A GET that is not answered in time is asked again; another call might have been obeyed.
        """
        for _ in range(10):
            with contextlib.suppress(httpx.ReadTimeout) if method == "GET" else contextlib.nullcontext():
                response = httpx.request(method, f"{self.url}{path}", timeout=60, **body)
                if response.status_code != 503:
                    response.raise_for_status()
                    return response.json() if response.content else None
            time.sleep(1.0)
        raise AssertionError(f"the server did not answer {method} {path} in ten tries")

    def run_deployment(self, name: str, **parameters: Any) -> str:
        """Create a flow run of a deployment; returns its id."""
        deployment = self.get(f"/deployments/name/{name}")
        return self.post(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})["id"]

    def fill_form(self, name: str, run_name: str, **parameters: Any) -> str:
        """As the UI's form submits it, under a name that somebody typed; returns the flow run's id."""
        deployment = self.get(f"/deployments/name/{name}")
        return self.post(f"/deployments/{deployment['id']}/create_flow_run", {"name": run_name, "parameters": parameters})["id"]

    def train(self, run_id: str, deployment: str = "endurance/endurance", **values: Any) -> str:
        """A small run on the CPU in the site's own store."""
        overrides = {"run_id": run_id, "store": str(self.store), "device": "cpu", "training.segment_steps": 50, **values}
        return self.run_deployment(deployment, overrides=overrides)

    @property
    def store(self) -> Path:
        """Where runs of this site live."""
        return self.folder / "runs"

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        """As the API tells it."""
        return self.get(f"/flow_runs/{flow_run_id}")

    def state(self, flow_run_id: str) -> str:
        """Name of its state."""
        return str(self.flow_run(flow_run_id)["state_name"])

    def states(self, flow_run_id: str) -> list[dict[str, Any]]:
        """All that it was in, oldest first."""
        return sorted(self.get(f"/flow_run_states/?flow_run_id={flow_run_id}"), key=lambda state: state["timestamp"])

    def wait_end(self, flow_run_id: str, limit_s: float = 600.0) -> dict[str, Any]:
        """Until it is final."""
        wait_for(lambda: self.state(flow_run_id) in FINAL, f"the end of {flow_run_id}", limit_s)
        return self.flow_run(flow_run_id)

    def artifacts(self, flow_run_id: str) -> dict[str, dict[str, Any]]:
        """By key."""
        found = self.post("/artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
        return {artifact["key"]: artifact for artifact in found}

    def task_runs(self, flow_run_id: str) -> list[dict[str, Any]]:
        """All of them."""
        return self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}, "limit": 200})

    def log(self, flow_run_id: str) -> list[str]:
        """Lines of its log."""
        body = {"logs": {"flow_run_id": {"any_": [flow_run_id]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        return [str(line["message"]) for line in self.post("/logs/filter", body)]

    def events(self, prefix: str, run_id: str) -> list[dict[str, Any]]:
        """Custom events of a run."""
        body = {"filter": {"event": {"prefix": [prefix]}, "resource": {"id": [f"mem.run.{run_id}"]}}, "limit": 50}
        return self.post("/events/filter", body)["events"]

    # -- the run folder and its processes -----------------------------------------------------------------------------------

    def validated_step(self, run_id: str) -> int:
        """Highest step with a good verdict, read from the journal."""
        steps = [0]
        for path in (self.store / run_id / "journal").glob("attempt-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)["event"]
                    if event["event"] == "checkpoint_judged" and event["verdict"]["valid"]:
                        steps.append(event["verdict"]["step"])
        return max(steps)

    def wait_validated(self, run_id: str, step: int, limit_s: float = 600.0) -> None:
        """Until a checkpoint of at least `step` is proven."""
        wait_for(lambda: self.validated_step(run_id) >= step, f"validated step {step} of {run_id}", limit_s)

    def holder(self, run_id: str) -> int:
        """Pid of the flow process that holds a run."""
        return int(json.loads((self.store / run_id / "lease.json").read_text())["pid"])

    def processes(self, run_id: str) -> list[int]:
        """Every process that works for a run: those marked with its folder."""
        marker = f"MEM_RUN_FOLDER={self.store / run_id}"
        found: list[int] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environ = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace").split("\0")
                if marker in environ and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def result(self, run_id: str) -> dict[str, Any]:
        """result.json of a run."""
        return json.loads((self.store / run_id / "result.json").read_text())


def wait_for(condition: Callable[[], bool], what: str, limit_s: float) -> float:
    """Poll until it holds; returns the seconds it took."""
    started_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - started_s
        assert waited_s < limit_s, f"no {what} within {limit_s:.0f} s"
        time.sleep(0.25)
    return time.monotonic() - started_s
