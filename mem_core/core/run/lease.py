"""Who holds a run and until when: said for people and for the next start. What fences is the journal's file of an attempt, never this.

    lease.json                       the newest holder's word, where everybody has always looked for it
    leases/attempt-000N.json         the word of attempt N, which no other attempt ever writes

An older attempt that was stopped between its look at the fence and its write can overwrite `lease.json`: no file system takes a write
only if another file is not there. It looks again right after the write and puts the newer word back, and whoever reads believes the
newest attempt's own file first.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from mem_core.domain.errors import RunHeld, StoreUnavailable
from mem_core.domain.units import Value
from mem_core.infrastructure.machine.process_facts import boot_id, pid_namespace, start_ticks
from mem_core.infrastructure.storage.journal_file import attempt_files
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_json, read_regular_text
from mem_core.infrastructure.storage.whole_file import write_atomically

LEASE_S = 30.0
LEASE_NAME = "lease.json"


class Lease(Value):
    """Who holds a run. Where the same pids are seen, pid and start time name the holder for certain."""

    run_id: str
    attempt: int = Field(ge=1)
    pid: int = Field(ge=1, lt=2**31, description="Never 0 or less: a signal to such a number reaches every process there is.")
    start_ticks: int
    boot_id: str
    host: str
    since_unix_s: float
    expires_unix_s: float
    released: bool = False
    pid_namespace: str = Field(default="", description="In which its pid counts; empty in leases of older versions.")

    def is_from_here(self) -> bool:
        """Whether its pid can be looked up by this process. A host's name says little: machines made from one image share it, and a
        machine of another boot is another one until the contrary is known. Containers of one host share the boot, and not the pids."""
        same_pids = self.pid_namespace in ("", pid_namespace())
        return self.host == socket.gethostname() and self.boot_id == boot_id() and same_pids

    def is_own(self) -> bool:
        """Whether this process holds it."""
        return self.is_from_here() and self.pid == os.getpid()

    def holder_alive(self, now_unix_s: float) -> bool:
        """Whether the holder may still write: certain where its pid can be looked up, by the lease time elsewhere.

        After a reboot too the lease time decides: what looks like this machine rebooted may be another one of the same name that lives,
        and half a minute is over before a machine has come up.
        """
        if self.released:
            return False
        if self.is_from_here() and start_ticks(self.pid) != self.start_ticks:
            return False
        return now_unix_s < self.expires_unix_s

    def held(self) -> RunHeld:
        """The error of whoever comes second."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix_s))
        return RunHeld(
            f"run {self.run_id} is held by process {self.pid} on {self.host} since {since} (attempt {self.attempt})",
            remedy=f"Wait for it, stop it with: mem stop {self.run_id}, or use another run_id.",
        )


class LeaseFile:
    """The lease of one attempt as it writes it."""

    def __init__(self, folder: Path, run_id: str, attempt: int, clock: Callable[[], float]) -> None:
        self._folder, self._run_id, self._attempt, self._clock = folder, run_id, attempt, clock
        self._own = own_lease_path(folder, attempt)
        self._since_unix_s = clock()

    def write(self, lease_s: float, *, released: bool = False) -> None:
        """Say who holds the run for `lease_s` from now on; an attempt that a newer one has replaced says nothing.

        Raises:
            StoreUnavailable: the folder takes no file.
        """
        if newest_attempt(self._folder) > self._attempt:
            return
        text = self._lease(lease_s, released).model_dump_json(indent=2)
        with contextlib.suppress(OSError):
            self._own.parent.mkdir(exist_ok=True)
        write_atomically(self._own, text)
        write_atomically(self._folder / LEASE_NAME, text)
        newer = newest_attempt(self._folder)
        if newer > self._attempt:
            with contextlib.suppress(OSError, StoreUnavailable):  # the newer one renews its word soon in any case
                write_atomically(self._folder / LEASE_NAME, read_regular_text(own_lease_path(self._folder, newer), RECORD_LIMIT_BYTES))

    def forget_older(self) -> None:
        """Remove the words of attempts before this one: their fence has fallen."""
        for path in self._own.parent.glob("attempt-*.json"):
            if path != self._own:
                with contextlib.suppress(OSError):
                    path.unlink()

    def drop(self) -> None:
        """A full disk takes no new lease, but lets the old one go."""
        for path in (self._own, self._folder / LEASE_NAME):
            with contextlib.suppress(OSError):
                path.unlink()

    def _lease(self, lease_s: float, released: bool) -> Lease:
        pid = os.getpid()
        return Lease(
            run_id=self._run_id, attempt=self._attempt, pid=pid, start_ticks=start_ticks(pid) or 0, boot_id=boot_id(),
            host=socket.gethostname(), since_unix_s=self._since_unix_s, expires_unix_s=self._clock() + lease_s, released=released,
            pid_namespace=pid_namespace(),
        )  # fmt: skip


def read_lease(folder: Path) -> Lease | None:
    """Who holds the run: by the newest attempt's own file, else by lease.json. None where neither is there or can be read."""
    return _read(believed_lease(folder)) or _read(folder / LEASE_NAME)


def believed_lease(folder: Path) -> Path:
    """The file that decides who holds the run."""
    own = own_lease_path(folder, newest_attempt(folder))
    return own if _read(own) is not None else folder / LEASE_NAME


def own_lease_path(folder: Path, attempt: int) -> Path:
    """Where an attempt says that it holds the run."""
    return folder / "leases" / f"attempt-{attempt:04d}.json"


def newest_attempt(folder: Path) -> int:
    """The highest attempt that ever claimed the run; 0 where none did."""
    try:
        return max((number for number, _ in attempt_files(folder / "journal")), default=0)
    except OSError:  # no journal, or something else in its place
        return 0


def _read(path: Path) -> Lease | None:
    try:
        return Lease.model_validate(read_json(path))
    except (OSError, ValueError):
        return None
