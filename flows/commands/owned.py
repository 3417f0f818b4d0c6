"""`mem` in a process that dies with the one that started it: `python -m flows.commands.owned OWNER_PID VERB...`.

For flows: a flow process that is killed must leave nothing behind. The owner is the thread that waits for it.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from mem_core.infrastructure.machine.process_ties import die_with_parent


def run_owned(arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run `mem ARGUMENTS` to its end and return what it said. Ends with this thread, whatever ends it: SIGKILL, a cancel, an error."""
    return run_to_end([sys.executable, "-P", "-m", "flows.commands.owned", str(os.getpid()), *arguments], environment)


def run_to_end(
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command until *it* ends and return what it said. Through files: a pipe ends only when the last process that holds it does.

    Raises:
        subprocess.TimeoutExpired: it was killed after `timeout_s`.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        env = None if environment is None else dict(environment)
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s, check=False)
        return subprocess.CompletedProcess(command, done.returncode, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    from flows.cli import main

    main(sys.argv[2:])
