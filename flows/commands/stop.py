"""`mem stop RUN`: ask the holder to commit and stop."""

import os
import signal
import sys
import time
from pathlib import Path

from mem_core.core.run.lease import read_lease
from mem_core.domain.errors import RequestError, RunHeld


def stop_run(folder: Path, wait_s: float) -> int:
    """Send SIGTERM to the holder and wait until it has let go. Exit 0 when nobody holds the run any more."""
    lease = read_lease(folder)
    if lease is None:
        raise RequestError("there is no such run", field="RUN", value=folder, remedy="Give a run id with --store, or a run folder.")
    if not lease.holder_alive(time.time()):
        print(f"nobody holds {lease.run_id}", file=sys.stderr)
        return 0
    if not lease.is_from_here():  # here that number belongs to somebody else
        raise RunHeld(
            f"process {lease.pid} on {lease.host} holds {lease.run_id}, where pids are others than here",
            remedy=f"Give the command where it runs (another machine, container or boot of {lease.host}), or wait for it.",
        )
    try:
        os.kill(lease.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError as exc:
        raise RunHeld(f"process {lease.pid} of another user holds {lease.run_id}", remedy="Ask that user to stop it.") from exc
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        now = read_lease(folder)
        if now is None or not now.holder_alive(time.time()):
            print(f"{lease.run_id} has stopped; the same command goes on with it", file=sys.stderr)
            return 0
        time.sleep(0.1)
    print(f"process {lease.pid} still holds {lease.run_id} after {wait_s:.0f} s", file=sys.stderr)
    return 75
