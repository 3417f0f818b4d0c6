"""The embedded Prefect server: started by `mem train` when no PREFECT_API_URL is set, and gone with it, whatever happens.

Prefect's own ephemeral server outlives a killed flow, loses task-run records at exit and can miss its start limit on a fresh
database. This one asks for the parent-death signal first, has batch settings that keep up, and starts from a migrated template.
Its port is bound here before anything else is done and handed down: whoever answers there is ours, also after a restart.

As a program: `python -m flows.server.embedded serve OWNER_PID SOCKET_FD [ALLOWED_HOST...] PORT` or `... migrate OWNER_PID`.
"""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flows.server.database import database_for, not_kept
from flows.server.gate import Gate
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.infrastructure.machine.process_facts import tail
from mem_core.infrastructure.machine.process_ties import die_with_parent
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.writing import PRIVATE, open_to_append

HOST = "127.0.0.1"
BACKLOG = 2_048
START_LIMIT_S = 180.0
MIGRATION_LIMIT_S = 900.0  # some ten seconds on a quiet machine, once; minutes on one that is starved
MAX_RESTARTS = 20
LOOK_S = 0.5
SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_API_MAX_PARAMETER_SIZE": "0",  # a request that names thousands of files is one all the same
    "PREFECT_UI_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
}
UI_SETTINGS = {"PREFECT_UI_ENABLED": "true", "PREFECT_UI_API_URL": "/api", "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "true"}


class EmbeddedServer:
    """A Prefect API on loopback with a database of its own for one run."""

    def __init__(self, listener: socket.socket, hosts: tuple[str, ...], environment: dict[str, str], database: Path) -> None:
        self._listener = listener
        self.port = int(listener.getsockname()[1])
        self.url = f"http://{HOST}:{self.port}/api"
        self.database = database
        program = [sys.executable, "-P", "-m", "flows.server.embedded", "serve", str(os.getpid()), str(listener.fileno())]
        self._command = [*program, *hosts, str(self.port)]
        self._environment = environment
        self._log_path = database.with_name(f"{database.name}.log")
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process = self._spawn("wb")

    @classmethod
    def start(
        cls,
        settings: Settings,
        run_key: str,
        *,
        port: int | None = None,
        ui: bool = False,
        allowed_hosts: tuple[str, ...] = (),
        note: Callable[[str], None] = lambda text: None,
    ) -> "EmbeddedServer":
        """Begin to start; returns at once, but for the first time with a Prefect version. `wait_ready` tells when it answers.

        `port` None: any that is free. `ui` also serves Prefect's pages. `allowed_hosts`: names beside loopback's own that may be asked
        for, see `gate`. `note` is told where the database was damaged and had to be built anew.

        Raises:
            EnvironmentUnfit: the port is taken, or the database cannot be made.
        """
        listener = bound(port or 0)
        try:
            environment = _environment(settings)
            folder = settings.prefect_template_dir
            database = database_for(folder, run_key, lambda path: migrate(path, environment), note)
            with contextlib.suppress(OSError):
                database.chmod(PRIVATE)  # it takes what requests say; its journal files get the same mode
            shown = UI_SETTINGS if ui else {}
            origins = ",".join(f"http://{name}:{listener.getsockname()[1]}" for name in (HOST, "localhost"))
            environment = {
                **environment, **shown, **_database_setting(database),
                "PREFECT_API_DATABASE_MIGRATE_ON_START": "false", "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origins,
            }  # fmt: skip
            return cls(listener, allowed_hosts, environment, database)
        except BaseException as exc:
            listener.close()
            if isinstance(exc, OSError):
                raise not_kept(exc, settings.prefect_template_dir) from exc
            raise

    def _spawn(self, log_mode: str) -> "subprocess.Popen[bytes]":
        with open_to_append(self._log_path) as log:
            if log_mode == "wb":
                log.truncate(0)
            return subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=[self._listener.fileno()],
            )  # fmt: skip

    def keep_alive(self) -> None:
        """From now on start it again, at its port and with its database, whenever it dies; `close` ends that."""
        threading.Thread(target=self._restart_when_dead, name="embedded-server", daemon=True).start()

    def _restart_when_dead(self) -> None:
        for _ in range(MAX_RESTARTS):
            while self._process.poll() is None:
                if self._closing.wait(LOOK_S):
                    return
            with self._lock:
                if self._closing.is_set():
                    return
                self._process = self._spawn("ab")
            # The parent-death signal of a child is that of the thread which started it: this thread waits for as long as it lives.
        self._listener.close()  # nobody will answer any more: refuse
        while not self._closing.wait(LOOK_S):
            pass

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until the API answers. The port was bound by this process, so that nobody else's health can be taken for it.

        Raises:
            EnvironmentUnfit: it died or did not answer in time.
        """
        import httpx

        end = time.monotonic() + limit_s
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
        lines = tail(self._log_path, 5)
        raise EnvironmentUnfit(
            "the embedded Prefect server did not start",
            value=" | ".join(lines) or f"no word within {limit_s:.0f} s",
            remedy=f"Read {self._log_path}, start again, or set PREFECT_API_URL to a server of your own.",
        )

    def close(self) -> None:
        """End it."""
        with self._lock:
            self._closing.set()
            self._listener.close()
            self._process.terminate()
            try:
                self._process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def bound(port: int) -> socket.socket:
    """A listening socket on loopback; port 0 means any that is free. Connections wait in it until a server accepts them.

    Raises:
        EnvironmentUnfit: the port is taken, or not for this user.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as exc:
        listener.close()
        taken = getattr(exc, "errno", None) == errno.EADDRINUSE
        raise EnvironmentUnfit(
            f"port {port} is taken" if taken else f"port {port} cannot be used ({getattr(exc, 'strerror', None) or exc})",
            field="--port",
            value=port,
            remedy="Another server runs there: set PREFECT_API_URL to it, stop it, or give another --port.",
        ) from exc
    return listener


def _environment(settings: Settings) -> dict[str, str]:
    kept = {name: value for name, value in settings.environ.items() if name != "PREFECT_API_URL"}
    return {**kept, **SERVER_SETTINGS}


def _database_setting(database: Path) -> dict[str, str]:
    return {"PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}"}


def migrate(database: Path, environment: dict[str, str]) -> None:
    """Make a new database of this Prefect version, in a process of its own that dies with this one.

    Raises:
        EnvironmentUnfit: it could not be made.
    """
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-m", "flows.server.embedded", "migrate", str(os.getpid())],
            env={**environment, **_database_setting(database)}, capture_output=True, text=True, timeout=MIGRATION_LIMIT_S, check=False,
        )  # fmt: skip
        problem = "" if result.returncode == 0 and database.exists() else result.stderr[-300:] or f"exit {result.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"not done within {MIGRATION_LIMIT_S:.0f} s; the machine may be overloaded"
    if problem:
        raise EnvironmentUnfit(
            "Prefect's database could not be made", value=problem, remedy="Start again, or set PREFECT_API_URL to a server of your own."
        )


def main(argv: list[str]) -> int:
    """Serve or migrate."""
    die_with_parent(int(argv[1]))
    if argv[0] == "serve":
        _serve(socket.socket(fileno=int(argv[2])), tuple(argv[3:-1]))
    else:
        _migrate()
    return 0


def _serve(listener: socket.socket, allowed_hosts: tuple[str, ...]) -> None:
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_UI_ENABLED

    from flows.server.shown.pages import Pages

    app = create_app()
    if PREFECT_UI_ENABLED.value():  # one for people, not one that a run keeps for itself
        app = Pages(app, Settings.from_environment().mem_home)
    uvicorn.Server(uvicorn.Config(Gate(app, allowed_hosts), log_level="error", lifespan="on")).run(sockets=[listener])


def _migrate() -> None:
    import asyncio

    from prefect.server.database import provide_database_interface

    async def create() -> None:
        await provide_database_interface().create_db()

    asyncio.run(create())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
