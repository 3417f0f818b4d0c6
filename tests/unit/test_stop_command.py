"""`mem stop` signals a holder only where its pid means that process."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.commands.stop import stop_run
from mem_core.core.run.lease import LEASE_NAME, Lease
from mem_core.domain.errors import RunHeld
from mem_core.infrastructure.machine.process_facts import boot_id, pid_namespace, start_ticks


@pytest.fixture
def somebody() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "changes", [{"host": "elsewhere"}, {"boot_id": "another"}, {"pid_namespace": "pid:[1]"}], ids=["machine", "boot", "container"]
)
def test_a_pid_of_somewhere_else_is_never_signalled(changes: dict[str, str], somebody: subprocess.Popen[bytes], tmp_path: Path) -> None:
    lease = Lease(
        run_id="run", attempt=1, pid=somebody.pid, start_ticks=start_ticks(somebody.pid) or 0, boot_id=boot_id(), host=socket.gethostname(),
        since_unix_s=0.0, expires_unix_s=time.time() + 60, pid_namespace=pid_namespace(),
    )  # fmt: skip
    assert lease.is_from_here()
    (tmp_path / LEASE_NAME).write_text(lease.model_copy(update=changes).model_dump_json())
    with pytest.raises(RunHeld, match="where pids are others"):
        stop_run(tmp_path, wait_s=1.0)
    assert somebody.poll() is None
    assert somebody.pid != os.getpid()
