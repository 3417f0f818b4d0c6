"""`mem` in a process that dies with the one that started it: `python -m flows.commands.owned OWNER_PID VERB...`.

For flows: a flow process that is killed must leave nothing behind. The owner is the thread that waits for it.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from mem_core.infrastructure.machine.process_ties import die_with_parent


def run_owned(arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run `mem ARGUMENTS` to its end and return what it said. Ends with this thread, whatever ends it: SIGKILL, a cancel, an error."""
    return subprocess.run(
        [sys.executable, "-m", "flows.commands.owned", str(os.getpid()), *arguments],
        env=dict(environment), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    from flows.cli import main

    main(sys.argv[2:])
