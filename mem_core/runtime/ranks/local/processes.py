"""The owner's side of the fork server: start it, fork children from it, know how they ended."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mem_core.domain.errors import EnvironmentUnfit
from mem_core.infrastructure.machine.process_facts import tail
from mem_core.infrastructure.storage.writing import open_to_append

PRELOAD = ("mem_core.runtime.ranks.worker.preload",)


class ChildProcess:
    """A forked child: its control connection and how it ended. `fileno()` becomes readable when it has ended.

    Safe for several threads: the one that pumps replies and the one that ends the group both read the exit pipe.
    """

    def __init__(self, connection: Connection, exit_fd: int, log_path: Path, server_log: Path) -> None:
        self.connection = connection
        self.log_path = log_path
        self._server_log = server_log
        self.pid: int | None = None
        self._exit_fd = exit_fd
        self._exit_code: int | None = None
        self._text = b""
        self._lock = threading.Lock()
        os.set_blocking(exit_fd, False)

    def fileno(self) -> int:
        """The exit pipe, for `multiprocessing.connection.wait`."""
        return self._exit_fd

    def exit_code(self) -> int | None:
        """None while alive; the exit code, or the negative signal number. -9 also when the fork server itself is gone."""
        self._drain()
        return self._exit_code

    def wait_forked(self, deadline_s: float) -> int:
        """Wait until the server has forked this child; returns its pid.

        Raises:
            EnvironmentUnfit: the fork server died or is not done with its imports in time.
        """
        end = time.monotonic() + deadline_s
        while self.pid is None:
            time.sleep(0.01)  # not a select: another thread may have read the message already
            self._drain()
            if self.pid is None and (self._exit_code is not None or time.monotonic() >= end):
                raise EnvironmentUnfit(
                    f"the fork server gave no worker process: {_last_words(self._server_log)}",
                    value=f"waited {deadline_s:.0f} s",
                    remedy=f"Read the last lines of {self._server_log}.",
                )
        return self.pid

    def signal(self, number: int) -> None:
        """Send a signal to the process; a process that is gone is fine."""
        if self.pid is not None and self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the child's whole session."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def only_connection(self) -> Connection:
        """Its connection, where there is no process to wait for."""
        os.close(self._exit_fd)
        self._exit_fd = -1
        return self.connection

    def close(self) -> None:
        """Forget the child; its descriptors are closed. Nobody may wait on them any more."""
        self.connection.close()
        with self._lock:
            if self._exit_fd >= 0:
                os.close(self._exit_fd)
                self._exit_fd = -1

    def _drain(self) -> None:
        with self._lock:
            self._read_exit_pipe()

    def _read_exit_pipe(self) -> None:
        while self._exit_fd >= 0 and self._exit_code is None:
            try:
                chunk = os.read(self._exit_fd, 4096)
            except BlockingIOError:
                return
            self._text += chunk
            for line in self._text.decode().splitlines():
                word, _, number = line.partition(" ")
                if word == "pid":
                    self.pid = int(number)
                elif word == "exit":
                    self._exit_code = int(number)
            if not chunk and self._exit_code is None:
                self._exit_code = -signal.SIGKILL


def _last_words(log: Path) -> str:
    said = [line.strip() for line in tail(log, 3) if line.strip()]
    return " | ".join(said)[-600:] or "it ended without a word"


class ForkServer:
    """A process with torch, deepspeed and transformers imported, from which workers are forked in milliseconds.

    The parent-death signal is tied to the thread that started the process, so that thread is one of its own which lives as
    long as the server does. A server that died is replaced at the next `fork`.
    """

    def __init__(self, environment: dict[str, str], log_folder: Path, preload: tuple[str, ...]) -> None:
        self._environment = environment
        self._preload = preload
        self._log_folder = log_folder
        self.own_log = log_folder / f"fork-server-{os.getpid()}.log"
        self._lock = threading.Lock()
        self._closed = False
        self._inside: set[str] = set()
        self._start()

    @classmethod
    def start(cls, environment: dict[str, str], log_folder: Path, preload: tuple[str, ...] = PRELOAD) -> "ForkServer":
        """Begin to import in the background; returns at once."""
        log_folder.mkdir(parents=True, exist_ok=True)
        return cls(environment, log_folder, preload)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started: list[subprocess.Popen[bytes] | OSError] = []
        done = threading.Event()

        def keep() -> None:
            try:
                started.append(self._open(theirs))
            except OSError as exc:
                started.append(exc)
            done.set()
            if isinstance(started[0], subprocess.Popen):
                started[0].wait()

        threading.Thread(target=keep, name="fork-server-keeper", daemon=True).start()
        done.wait()
        theirs.close()
        if isinstance(started[0], OSError):
            ours.close()
            raise started[0]
        self._process, self._link = started[0], ours
        self._inside.clear()

    def _open(self, theirs: socket.socket) -> "subprocess.Popen[bytes]":
        program = [
            sys.executable,
            "-P",  # a folder of that name where somebody works is not MEM
            "-m",
            "mem_core.runtime.ranks.local.fork_server",
            str(theirs.fileno()),
            str(os.getpid()),
            *self._preload,
        ]
        with open_to_append(self.own_log) as log:
            return subprocess.Popen(
                program,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    def exit_code(self, wait_s: float = 1.0) -> int | None:
        """How the server ended (negative: by that signal); None where it lives on. Waits a moment for an end that is under way."""
        end = time.monotonic() + wait_s
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return self._process.poll()

    def last_lines(self, num_lines: int = 20) -> tuple[str, ...]:
        """What the server itself said last: why it could not import, for one."""
        return tail(self.own_log, num_lines)

    def log_into(self, folder: Path) -> None:
        """Children forked from now on write their logs there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log_folder = folder

    def fork(self, entry: str, log_name: str) -> ChildProcess:
        """Ask for a child that runs `module:function(connection)`. Returns at once; `wait_forked` tells when it is there.

        Raises:
            EnvironmentUnfit: the server died and its replacement died too.
        """
        return self._of_a_live_server(lambda: self._ask(entry, self._log_folder / log_name))

    def _of_a_live_server(self, ask: Callable[[], ChildProcess | None]) -> ChildProcess:
        """What this server gives, or the one that replaces it. Raises EnvironmentUnfit."""
        with self._lock:
            for _ in range(2):
                child = ask() if self.alive() else None
                if child is not None:
                    return child
                if self._closed:
                    break
                self._link.close()
                self._start()
        raise EnvironmentUnfit(f"the fork server has died: {_last_words(self.own_log)}", remedy=f"Read the last lines of {self.own_log}")

    def begin_inside(self, entry: str, order: Any, key: str) -> Connection | None:
        """Have `module:function(connection)` run in the server itself, before whatever is asked for later; it is sent `order` first. The
        connection tells what it says. None where this server was asked for `key` before: a new one, after a death, was not.

        Raises:
            EnvironmentUnfit: the server died and its replacement died too.
        """
        if self.alive() and key in self._inside:
            return None
        child = self._of_a_live_server(lambda: self._ask(entry, self.own_log, inside=True))
        with contextlib.suppress(OSError):  # a server that died meanwhile
            child.connection.send(order)
        self._inside.add(key)
        return child.only_connection()

    def replace(self) -> None:
        """End the server, whatever it is in, and start another in its place. Children that still live die with it."""
        with self._lock:
            self._process.kill()
            self._process.wait()
            self._link.close()
            self._start()

    def _ask(self, entry: str, log_path: Path, *, inside: bool = False) -> ChildProcess | None:
        ours, theirs = socket.socketpair()
        exit_read, exit_write = os.pipe()
        try:
            order = json.dumps({"entry": entry, "log": str(log_path), "inside": inside}).encode()
            socket.send_fds(self._link, [order], [theirs.fileno(), exit_write])
        except OSError:
            ours.close()
            os.close(exit_read)
            return None
        finally:
            theirs.close()
            os.close(exit_write)
        return ChildProcess(Connection(ours.detach()), exit_read, log_path, self.own_log)

    def close(self) -> None:
        """End the server; children that still live die with it."""
        with self._lock:
            self._closed = True
            self._link.close()
        try:
            code = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code in (0, -signal.SIGKILL):
            self.own_log.unlink(missing_ok=True)  # a server that failed leaves its words behind
