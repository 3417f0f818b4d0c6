"""The embedded Prefect server has its port to itself, answers only whom it should, dies and comes back at its port; a damaged database
and an ending that Prefect could not take down cost nothing."""

import dataclasses
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from flows.commands.train import ended_without_prefect
from flows.server.embedded import EmbeddedServer, bound
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.errors import EnvironmentUnfit, MemoryExhausted
from mem_core.domain.events import AttemptStarted, RunEnded
from mem_core.infrastructure.settings import Settings


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.integration
def test_a_killed_server_comes_back_and_a_closed_one_does_not(tmp_path: Path) -> None:
    """SIGKILL; within bounded time another process answers at the same address; after `close` nobody does.

    From the first moment on nobody else can listen there, nor be taken for it. Its own hosts are answered and no others.
    """
    server = EmbeddedServer.start(Settings.from_environment(), str(tmp_path), ui=True, allowed_hosts=("mem.example.org",))
    try:
        with pytest.raises(EnvironmentUnfit, match=f"port {server.port} is taken"):
            bound(server.port)
        server.wait_ready()
        check_gate(server)
        server.keep_alive()
        first = server.pid
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 120
        while not (server.pid != first and answers(server.url)) and time.monotonic() < end:
            time.sleep(0.1)
        assert server.pid != first
        assert answers(server.url)
        with pytest.raises(EnvironmentUnfit):
            bound(server.port)
    finally:
        server.close()
    time.sleep(1.2)  # two looks of the thread that restarts it
    assert not answers(server.url)


def check_gate(server: EmbeddedServer) -> None:
    """Over plain HTTP, the UI's web sockets included."""
    own, host, away = f"http://127.0.0.1:{server.port}", f"127.0.0.1:{server.port}", "http://evil.example"
    pairs = ((host, ""), (host, own), ("mem.example.org", "https://mem.example.org"), (host, away), ("evil.example", ""))
    asked = {
        (path, given_host, origin): httpx.get(f"{own}{path}", headers={"host": given_host, **({"origin": origin} if origin else {})})
        for path in ("/api/health", "/")
        for given_host, origin in pairs
    }
    for (_, given_host, origin), answer in asked.items():
        assert answer.status_code == (403 if away in origin or "evil" in given_host else 200)
        assert "*" not in answer.headers.get("access-control-allow-origin", "")
    preflight = {"origin": away, "access-control-request-method": "POST"}
    assert httpx.options(f"{own}/api/flows/", headers=preflight).status_code == 403
    assert (upgrade(server, own), upgrade(server, away)) == (b"101", b"403")


def upgrade(server: EmbeddedServer, origin: str) -> bytes:
    """Status of the answer to a web socket's first request."""
    lines = (
        "GET /api/events/out HTTP/1.1", f"Host: 127.0.0.1:{server.port}", f"Origin: {origin}", "Connection: Upgrade", "Upgrade: websocket",
        "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol: prefect", "", "",
    )  # fmt: skip
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as link:
        link.sendall("\r\n".join(lines).encode())
        return link.recv(64).split(b" ")[1]


@pytest.mark.integration
def test_a_run_s_damaged_database_is_built_anew_and_its_server_answers(tmp_path: Path) -> None:
    """Random bytes in the place of the run's own one; a server of its own kind lists no flow runs, which asks the database."""
    server = EmbeddedServer.start(Settings.from_environment(), str(tmp_path))
    server.close()
    server.database.write_bytes(os.urandom(server.database.stat().st_size))
    notes: list[str] = []
    server = EmbeddedServer.start(Settings.from_environment(), str(tmp_path), note=notes.append)
    try:
        server.wait_ready()
        assert httpx.post(f"{server.url}/flow_runs/count", json={}, timeout=60).json() == 0
    finally:
        server.close()
    assert len(notes) == 1
    assert "was damaged" in notes[0]


def test_a_port_that_somebody_has_is_refused_and_one_that_is_none_too() -> None:
    """A stranger who answers there is never taken for our server."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        with pytest.raises(EnvironmentUnfit, match=f"port {port} is taken"):
            EmbeddedServer.start(Settings.from_environment(), "stranger", port=port)
    with pytest.raises(EnvironmentUnfit, match="port 99999 cannot be used"):
        EmbeddedServer.start(Settings.from_environment(), "stranger", port=99_999)


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    settings = dataclasses.replace(Settings.from_environment(), mem_home=tmp_path / "home")
    with pytest.raises(EnvironmentUnfit, match="MEM_HOME"):
        EmbeddedServer.start(settings, "nowhere")


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
