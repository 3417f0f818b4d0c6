"""The embedded Prefect server dies and comes back at its port; a run whose ending Prefect could not take down ends as its journal says."""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from flows.commands.train import ended_without_prefect
from flows.server.embedded import EmbeddedServer
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.errors import MemoryExhausted
from mem_core.domain.events import AttemptStarted, RunEnded
from mem_core.infrastructure.settings import Settings


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.integration
def test_a_killed_server_comes_back_and_a_closed_one_does_not(tmp_path: Path) -> None:
    """SIGKILL; within bounded time another process answers at the same address; after `close` nobody does."""
    server = EmbeddedServer.start(Settings.from_environment(), str(tmp_path))
    try:
        server.wait_ready()
        server.keep_alive()
        first = server.pid
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 120
        while not (server.pid != first and answers(server.url)) and time.monotonic() < end:
            time.sleep(0.1)
        assert server.pid != first
        assert answers(server.url)
    finally:
        server.close()
    time.sleep(1.2)  # two looks of the thread that restarts it
    assert not answers(server.url)


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("failed", 78), ("interrupted", 75)])
def test_the_journal_says_how_a_run_ended_where_prefect_could_not_be_told(tmp_path: Path, status: str, code: int) -> None:
    """Its status, code and message; any other kind of error stays what it is."""
    state = StateManager.acquire(tmp_path, "run")
    state.start_attempt(None)
    away = httpx.ConnectError("refused")
    assert ended_without_prefect(state.folder, away) is None, "it has no ending yet"
    state.emit(RunEnded(status=status, exit_code=code, message="no smaller plan is left"))  # type: ignore[arg-type]
    state.release()
    ended = ended_without_prefect(state.folder, away)
    assert ended is not None
    assert (ended[0].status, ended[0].exit_code) == (status, code)
    assert (ended[1].exit_code if ended[1] else 0) == code
    assert isinstance(ended[1], MemoryExhausted) == (code == 78)
    assert str(ended[1] or "no smaller plan is left") == "no smaller plan is left", "word for word, nothing added"
    assert ended_without_prefect(state.folder, ValueError("a bug")) is None


def test_the_ending_of_an_earlier_attempt_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """Prefect is away when a process wants to go on with a run that another process has completed: nothing has ended now."""
    state = StateManager.acquire(tmp_path, "run")
    state.emit(AttemptStarted(attempt=1, pid=os.getpid() + 1, host="h"))
    state.emit(RunEnded(status="completed", exit_code=0, message=""))
    state.release()
    assert ended_without_prefect(state.folder, httpx.ConnectError("refused")) is None
