"""The owner's side of the fork server: start it, fork children from it, know how they ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from mem_core.domain.errors import EnvironmentUnfit

PRELOAD = ("mem_core.runtime.worker.preload",)


class ChildProcess:
    """A forked child: its control connection and how it ended. `fileno()` becomes readable when it has ended."""

    def __init__(self, connection: Connection, exit_fd: int, log_path: Path) -> None:
        self.connection = connection
        self.log_path = log_path
        self.pid: int | None = None
        self._exit_fd = exit_fd
        self._exit_code: int | None = None
        self._text = b""
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
                    "the fork server gave no worker process",
                    value=f"waited {deadline_s:.0f} s",
                    remedy="Read the last lines of logs/fork-server-*.log under MEM_HOME (default ~/.cache/mem).",
                )
        return self.pid

    def signal(self, number: int) -> None:
        """Send a signal to the process; a process that is gone is fine."""
        if self.pid is not None and self.exit_code() is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def signal_group(self, number: int) -> None:
        """Send a signal to the child's whole session."""
        if self.pid is not None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """Forget the child; its descriptors are closed."""
        self.connection.close()
        if self._exit_fd >= 0:
            os.close(self._exit_fd)
            self._exit_fd = -1

    def _drain(self) -> None:
        if self._exit_fd < 0:
            return
        while self._exit_code is None:
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


class ForkServer:
    """A process with torch, deepspeed and transformers imported, from which workers are forked in milliseconds.

    Start it from a thread that lives as long as the run: the parent-death signal is tied to that thread.
    """

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket, log_folder: Path) -> None:
        self._process = process
        self._link = link
        self._log_folder = log_folder
        self.own_log = log_folder

    @classmethod
    def start(cls, environment: dict[str, str], log_folder: Path, preload: tuple[str, ...] = PRELOAD) -> "ForkServer":
        """Begin to import in the background; returns at once."""
        log_folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with (log_folder / f"fork-server-{os.getpid()}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "mem_core.runtime.worker_group.fork_server", str(theirs.fileno()), str(os.getpid()), *preload],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        server = cls(process, ours, log_folder)
        server.own_log = log_folder / f"fork-server-{os.getpid()}.log"
        return server

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    def log_into(self, folder: Path) -> None:
        """Children forked from now on write their logs there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log_folder = folder

    def fork(self, entry: str, log_name: str) -> ChildProcess:
        """Ask for a child that runs `module:function(connection)`. Returns at once; `wait_forked` tells when it is there."""
        ours, theirs = socket.socketpair()
        exit_read, exit_write = os.pipe()
        log_path = self._log_folder / log_name
        try:
            order = json.dumps({"entry": entry, "log": str(log_path)}).encode()
            socket.send_fds(self._link, [order], [theirs.fileno(), exit_write])
        except OSError as exc:
            ours.close()
            os.close(exit_read)
            raise EnvironmentUnfit("the fork server has died", remedy=f"Read the last lines of {self.own_log}") from exc
        finally:
            theirs.close()
            os.close(exit_write)
        return ChildProcess(Connection(ours.detach()), exit_read, log_path)

    def close(self) -> None:
        """End the server; children that still live die with it."""
        self._link.close()
        self.own_log.unlink(missing_ok=True)
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
