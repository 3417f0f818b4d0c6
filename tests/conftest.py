"""Fixtures for tests that start real processes: one fork server for all of them, runs without Prefect, the `mem` command.

Such tests share MEM_HOME (token shards, Prefect's template database); every run has a store of its own.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.testing.driver import drive as drive_run

MEM = Path(sys.executable).with_name("mem")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--pictures FOLDER`: where tests that photograph pages leave their pictures, for people to judge."""
    parser.addoption("--pictures", metavar="FOLDER", default=None, help="keep pictures of all pages there")


@pytest.fixture
def picture_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of `--pictures`, or one that goes away."""
    folder = Path(request.config.getoption("--pictures") or tmp_path / "pictures").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """torch, deepspeed and transformers imported once for all tests; takes 5 to 15 s. Knows the entries in tests/integration.

    Its ranks see relative paths from the repository's root, wherever the tests were started.
    """
    entries = {"PYTHONPATH": str(Path(__file__).parent / "integration")}
    environment = child_environment(Settings.from_environment(), device="cpu", extra=entries)
    with contextlib.chdir(Path(__file__).resolve().parents[1]):
        server = ForkServer.start(environment, tmp_path_factory.mktemp("fork-server"))
    yield server
    server.close()


@pytest.fixture
def drive(fork_server: ForkServer) -> Callable[..., RunResult]:
    """`mem_core.testing.driver.drive` on the shared fork server: a run in this process, without Prefect."""
    return partial(drive_run, server=fork_server)


@pytest.fixture
def nano(tmp_path: Path) -> Callable[..., RuntimeRequest]:
    """Makes small requests on real text: `nano("run-1", training={"max_steps": 60})`."""

    def make(run_id: str = "run", **sections: Any) -> RuntimeRequest:
        return RuntimeRequest.model_validate({"run_id": run_id, "store": str(tmp_path), "device": "cpu"} | sections)

    return make


@dataclass(frozen=True)
class MemRun:
    """How a `mem` command ended."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        return json.loads(self.out)


RunMem = Callable[..., MemRun]


@pytest.fixture(scope="session")
def run_mem() -> RunMem:
    """`run_mem(folder, "train", "request.yaml")`: the installed command, run in `folder` until it ends."""

    def run(folder: Path, *arguments: str, timeout_s: float = 300) -> MemRun:
        done = subprocess.run(
            [str(MEM), *arguments], cwd=folder, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False
        )
        return MemRun(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def mem(run_mem: RunMem, tmp_path: Path) -> RunMem:
    """`mem("train", "request.yaml", "--json")`: the installed command in the test's own folder."""
    return partial(run_mem, tmp_path)
