"""Processes that die while they import: what they said is kept from the first instruction, and reaches whoever waits for them."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.segment import Evidence, SegmentFailure, WorkerError, WorkerLost, last_words
from mem_core.runtime.ranks.local.group import WorkerGroup
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.ranks.local.ranks import LocalRanks
from mem_core.runtime.ranks.port import GroupFailed, Watch
from mem_core.runtime.ranks.worker.classify import classify_server_death
from mem_core.testing.contracts.ranks_contract import scripted_spec

START = TrainingPosition(applied_steps=0, batch_index=0)
Serve = Callable[[dict[str, str], str], ForkServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a fork server with variables of its own and one module to import first."""
    servers: list[ForkServer] = []

    def start(variables: dict[str, str], module: str) -> ForkServer:
        servers.append(ForkServer.start(dict(os.environ) | variables, tmp_path / "logs", preload=(module,)))
        servers[-1].log_into(tmp_path / "run-logs")
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def failure_of(group: WorkerGroup) -> SegmentFailure:
    with pytest.raises(GroupFailed) as caught:
        group.restore(None, START)
    return caught.value.failure


def failure_in(server: ForkServer, live: Path) -> SegmentFailure:
    group = LocalRanks(server, live, "mem_core.testing.scripted_rank:obedient").start(scripted_spec(1), Watch())
    try:
        return failure_of(group)
    finally:
        group.stop()


def broken_package(folder: Path) -> dict[str, str]:
    """A package on the path whose import fails, as half an installation does."""
    (folder / "brokenpkg").mkdir(parents=True)
    (folder / "brokenpkg" / "__init__.py").write_text("raise ValueError('no docstring of BaseModelOutput')\n")
    return {"PYTHONPATH": str(folder)}


def test_a_server_that_dies_at_an_import_tells_why_and_twice_is_enough(serve: Serve, tmp_path: Path) -> None:
    """The exception in the server's own log is the evidence, in the same words each time; no invented SIGKILL."""
    server = serve(broken_package(tmp_path / "path"), "brokenpkg")
    first, second = (failure_in(server, tmp_path / "live") for _ in range(2))
    assert isinstance(first, WorkerError)
    assert isinstance(second, WorkerError)
    assert first.evidence.exception == second.evidence.exception == "ValueError: no docstring of BaseModelOutput"
    assert first.before_any_step
    assert "brokenpkg" in last_words(first.evidence)
    server.close()
    assert "ValueError: no docstring" in server.own_log.read_text(), "the words outlive the server"


def test_asserts_and_docstrings_that_are_optimised_away(serve: Serve, tmp_path: Path) -> None:
    """What PYTHONOPTIMIZE=2 does to libraries that read their own docstrings at import."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "needsdoc.py").write_text('"""Args: x"""\nif not __doc__:\n    raise ValueError("no Args section in the docstring")\n')
    server = serve({"PYTHONPATH": str(folder), "PYTHONOPTIMIZE": "2"}, "needsdoc")
    failure = failure_in(server, tmp_path / "live")
    assert isinstance(failure, WorkerError)
    assert failure.evidence.exception == "ValueError: no Args section in the docstring"


def test_a_server_that_was_killed_is_a_kill(serve: Serve, tmp_path: Path) -> None:
    """A signal says nothing about the environment, and is tried again."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sleeper.py").write_text("import time\ntime.sleep(60)\n")
    server = serve({"PYTHONPATH": str(tmp_path / "path")}, "sleeper")
    ranks = LocalRanks(server, tmp_path / "live", "mem_core.testing.scripted_rank:obedient")
    group = ranks.start(scripted_spec(1), Watch())
    os.kill(server.pid, signal.SIGTERM)
    failure = failure_of(group)
    assert isinstance(failure, WorkerLost)
    assert failure.cause.startswith("SIGTERM")


def test_a_server_that_died_in_silence_and_one_that_said_something() -> None:
    """Only words make an error of it."""
    assert isinstance(classify_server_death(1, (), 0), WorkerLost)
    assert isinstance(classify_server_death(None, (), 0), WorkerLost)
    assert isinstance(classify_server_death(1, ("Traceback", "ImportError: x", ""), 0), WorkerError)


def test_last_words_are_bounded_and_name_their_rank() -> None:
    """For a console: some lines, no empty ones."""
    text = last_words(Evidence(rank=1, last_lines=("", "a", "b" * 900)), num_lines=2)
    assert text.splitlines()[0] == "last lines of rank 1:"
    assert max(len(line) for line in text.splitlines()) < 320
    assert last_words(Evidence()) == ""


def test_a_helper_that_gets_no_process_hears_what_the_server_said(serve: Serve, tmp_path: Path) -> None:
    """The validator's process comes from the same server."""
    server = serve(broken_package(tmp_path / "path"), "brokenpkg")
    child = server.fork("mem_core.testing.scripted_rank:obedient", "helper.log")
    with pytest.raises(EnvironmentUnfit, match="no docstring of BaseModelOutput"):
        child.wait_forked(20.0)
    child.close()
