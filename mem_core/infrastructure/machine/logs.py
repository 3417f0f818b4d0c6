"""Logs of child processes, kept within bounds: nobody may fill the disk of a run of weeks with what one library says at every step.

Children append (`O_APPEND`) to a file that they hold open, so that it can be cut from outside while they write: what comes next lands at
its new end. A few lines that are written at that very moment may be lost.
"""

import contextlib
import os
import re
import stat
from pathlib import Path

from mem_core.infrastructure.machine.process_facts import start_ticks
from mem_core.infrastructure.storage.reading import open_regular

MAX_LOG_BYTES = 8 << 20
KEPT_BYTES = 4 << 20
LAST_BYTES = 64 << 10  # stays in the file itself, since its last lines are what a failure is explained with
MOST_FORK_SERVER_LOGS = 20
_FORK_SERVER_LOG = re.compile(r"^fork-server-(\d+)\.log$")


class LogFolder:
    """The logs of one run's processes. Never raises: a log is not worth a run."""

    def __init__(self, folder: Path, max_bytes: int = MAX_LOG_BYTES, kept_bytes: int = KEPT_BYTES, last_bytes: int = LAST_BYTES) -> None:
        self._folder, self._max_bytes, self._kept_bytes, self._last_bytes = folder, max_bytes, kept_bytes, last_bytes

    def bound(self) -> None:
        """Cut every log that has grown too long: its last part goes to `NAME.log.1`, which replaces the one before."""
        for path in _logs(self._folder):
            with contextlib.suppress(OSError):
                if path.stat().st_size > self._max_bytes:
                    self._cut(path)

    def remove_empty(self) -> None:
        """At the end, when nobody writes any more."""
        for path in _logs(self._folder):
            with contextlib.suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()

    def _cut(self, path: Path) -> None:
        tail = _last(path, self._kept_bytes)
        older = path.with_name(f"{path.name}.1")
        partial = older.with_name(f".{older.name}")
        partial.write_bytes(tail)
        partial.replace(older)
        os.truncate(path, 0)
        last = tail[-self._last_bytes :]
        with path.open("ab") as file:
            file.write(f"[cut here; what was before is in {older.name}]\n".encode() + last[last.find(b"\n") + 1 :])


def remove_logs_of_the_dead(folder: Path) -> None:
    """Logs of fork servers whose owner was killed: empty ones go, of the others the newest stay, since they say why a server failed."""
    told: list[Path] = []
    for path in _logs(folder):
        match = _FORK_SERVER_LOG.match(path.name)
        if match is None or start_ticks(int(match.group(1))) is not None:
            continue
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
            else:
                told.append(path)
    with contextlib.suppress(OSError):
        for path in sorted(told, key=lambda item: item.stat().st_mtime_ns)[:-MOST_FORK_SERVER_LOGS]:
            path.unlink()


def _logs(folder: Path) -> tuple[Path, ...]:
    """Plain files named `*.log`, and nothing that stands in their place."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name.endswith(".log") and stat.S_ISREG(path.lstat().st_mode):
                found.append(path)
    return tuple(found)


def _last(path: Path, num_bytes: int) -> bytes:
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read(num_bytes)
