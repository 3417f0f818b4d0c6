"""The embedded Prefect server: started by `mem train` when no PREFECT_API_URL is set, and gone with it, whatever happens.

Prefect's own ephemeral server outlives a killed flow, loses task-run records at exit and can miss its start limit on a fresh
database. This one asks for the parent-death signal first, has batch settings that keep up, and starts from a migrated template.

As a program: `python -m flows.server.embedded serve OWNER_PID PORT` or `... migrate OWNER_PID`.
"""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from mem_core.domain.errors import EnvironmentUnfit
from mem_core.infrastructure.machine.process_facts import start_ticks, tail
from mem_core.infrastructure.machine.process_ties import die_with_parent
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.reading import copy_regular
from mem_core.infrastructure.storage.writing import PRIVATE, open_to_append

START_LIMIT_S = 180.0
MIGRATION_LIMIT_S = 900.0  # some ten seconds on a quiet machine, once; minutes on one that is starved
KEEP_DAYS = 14
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
    "PREFECT_UI_ENABLED": "false",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
}
UI_SETTINGS = {"PREFECT_UI_ENABLED": "true", "PREFECT_UI_API_URL": "/api", "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "true"}


class EmbeddedServer:
    """A Prefect API on loopback with a database of its own for one run."""

    def __init__(self, command: list[str], environment: dict[str, str], url: str, database: Path) -> None:
        self._command, self._environment = command, environment
        self.url = url
        self.database = database
        self._log_path = _log_of(database)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process = self._spawn("wb")

    @classmethod
    def start(cls, settings: Settings, run_key: str, *, port: int | None = None, ui: bool = False) -> "EmbeddedServer":
        """Begin to start; returns at once. `wait_ready` tells when it answers. `ui` also serves Prefect's pages."""
        folder = settings.prefect_template_dir
        folder.mkdir(parents=True, exist_ok=True)
        database = _database_for(folder, run_key)
        environment = _environment(settings, database)
        if not database.exists():
            copy_regular(_template(folder, environment), database)
        with contextlib.suppress(OSError):
            database.chmod(PRIVATE)  # it takes what requests say; its journal files get the same mode
        port = free_port() if port is None else port
        shown = UI_SETTINGS if ui else {}
        command = [sys.executable, "-m", "flows.server.embedded", "serve", str(os.getpid()), str(port)]
        environment = {**environment, "PREFECT_API_DATABASE_MIGRATE_ON_START": "false", **shown}
        return cls(command, environment, f"http://127.0.0.1:{port}/api", database)

    def _spawn(self, log_mode: str) -> "subprocess.Popen[bytes]":
        with open_to_append(self._log_path) as log:
            if log_mode == "wb":
                log.truncate(0)
            return subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

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
        while not self._closing.wait(LOOK_S):
            pass

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until the API answers.

        Raises:
            EnvironmentUnfit: it died or did not answer in time.
        """
        import httpx

        end = time.monotonic() + limit_s
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
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
            self._process.terminate()
            try:
                self._process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _log_of(database: Path) -> Path:
    return database.with_name(f"{database.name}.log")


def _environment(settings: Settings, database: Path) -> dict[str, str]:
    kept = {name: value for name, value in settings.environ.items() if name != "PREFECT_API_URL"}
    return {**kept, **SERVER_SETTINGS, "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}"}


def _database_for(folder: Path, run_key: str) -> Path:
    """One database per run and Prefect version, so that two runs never wait for one SQLite lock; old ones are removed."""
    from importlib.metadata import version

    runs = folder / "runs"
    runs.mkdir(exist_ok=True)
    for old in runs.glob("*.db*"):
        if time.time() - old.stat().st_mtime > KEEP_DAYS * 86_400:
            old.unlink(missing_ok=True)
    key = f"{run_key} {version('prefect')}"
    return runs / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.db"


def _template(folder: Path, environment: dict[str, str]) -> Path:
    """A migrated, empty database of this Prefect version, made once: migrations take most of a fresh server's 19 s."""
    from importlib.metadata import version

    template = folder / f"template-{version('prefect')}.db"
    if not template.exists():
        fresh = folder / f"template-{os.getpid()}.tmp"
        _remove_left_templates(folder)
        try:
            result = subprocess.run(
                [sys.executable, "-m", "flows.server.embedded", "migrate", str(os.getpid())],
                env={**environment, "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{fresh}"},
                capture_output=True, text=True, timeout=MIGRATION_LIMIT_S, check=False,
            )  # fmt: skip
            problem = "" if result.returncode == 0 and fresh.exists() else result.stderr[-300:] or f"exit {result.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not done within {MIGRATION_LIMIT_S:.0f} s; the machine may be overloaded"
        if problem:
            raise EnvironmentUnfit(
                "Prefect's database could not be made", value=problem, remedy="Start again, or set PREFECT_API_URL to a server of your own."
            )
        _checkpoint(fresh)
        fresh.replace(template)
    return template


def _remove_left_templates(folder: Path) -> None:
    """Files of makers that were killed; each is named by its maker's pid."""
    for path in folder.glob("template-*.tmp*"):
        pid = path.name.removeprefix("template-").partition(".")[0]
        if not pid.isdigit() or int(pid) == os.getpid() or start_ticks(int(pid)) is None:
            path.unlink(missing_ok=True)


def _checkpoint(database: Path) -> None:
    """Fold SQLite's write-ahead log into the file, so that a copy of the file alone is complete."""
    import sqlite3

    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    for suffix in ("-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def free_port() -> int:
    """A port of loopback that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(argv: list[str]) -> int:
    """Serve or migrate."""
    if argv[0] == "serve":
        die_with_parent(int(argv[1]))
        import uvicorn

        uvicorn.run(
            "prefect.server.api.server:create_app", factory=True, host="127.0.0.1", port=int(argv[2]), log_level="error", lifespan="on"
        )
        return 0
    die_with_parent(int(argv[1]))
    import asyncio

    from prefect.server.database import provide_database_interface

    async def migrate() -> None:
        await provide_database_interface().create_db()

    asyncio.run(migrate())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
