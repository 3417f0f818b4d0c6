"""`Ranks` on this machine: forked from one warm server, watched through files below the run's `live` folder."""

import itertools
import os
import shutil
from pathlib import Path
from typing import get_args

from mem_core.infrastructure.machine.process_facts import start_ticks
from mem_core.runtime.compiled.order import COMPILE, key_of
from mem_core.runtime.ranks.local.group import ENTRY, WorkerGroup
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.ranks.port import Purpose, Watch
from mem_core.runtime.ranks.worker.protocol import WorkerSpec


class LocalRanks:
    """One for a run. Each purpose has a corner of `live` that this process's pid names, and counts its tries from 1."""

    def __init__(self, server: ForkServer, live: Path, entry: str = ENTRY) -> None:
        """`entry` is the "module:function" that a rank runs."""
        self._server = server
        self._live = live
        self._entry = entry
        self._tries = {purpose: itertools.count(1) for purpose in get_args(Purpose)}

    def start(self, spec: WorkerSpec, watch: Watch) -> WorkerGroup:
        """See `Ranks.start`."""
        _remove_folders_of_the_dead(self._live)
        if spec.compiled:  # at once where the server has done it before; a new server compiles before it forks
            self._server.begin_inside(COMPILE, spec, key_of(spec))
        corner = f"{os.getpid()}" if watch.purpose == "train" else f"{os.getpid()}-{watch.purpose}"
        folder = self._live / corner / f"try-{next(self._tries[watch.purpose]):04d}"
        return WorkerGroup(self._server, spec, folder, watch, self._entry)

    def close(self) -> None:
        """End the fork server."""
        self._server.close()


def _remove_folders_of_the_dead(live: Path) -> None:
    """Corners of drivers that were killed: nobody else would ever remove them."""
    try:
        corners = list(live.iterdir())
    except OSError:
        return  # nobody was here yet, or another driver of the folder has just ended
    for folder in corners:
        pid = folder.name.partition("-")[0]
        if pid.isdigit() and start_ticks(int(pid)) is None:
            shutil.rmtree(folder, ignore_errors=True)
