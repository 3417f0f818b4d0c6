"""Who holds a run folder by its lease, as the doctor sees it."""

import time
from pathlib import Path

from mem_core.core.run.lease import read_lease
from mem_core.domain.environment import HolderObservation


def observe_holder(run_folder: Path) -> HolderObservation | None:
    """Who else holds the run by its lease; None when nobody does, or this process itself."""
    lease = read_lease(run_folder)
    if lease is None or lease.released or lease.is_own():
        return None
    now = time.time()
    return HolderObservation(
        owner=f"process {lease.pid} on {lease.host}",
        attempt=lease.attempt,
        alive=lease.holder_alive(now),
        expires_in_s=max(0.0, lease.expires_unix_s - now),
        since_unix_s=lease.since_unix_s,
    )
