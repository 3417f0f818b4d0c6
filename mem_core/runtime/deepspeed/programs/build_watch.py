"""The owner's side of an op build: it is watched, says whom it waits for, is bounded, and leaves no process behind.

PyTorch's builder waits for a lock file that another process holds, for as long as that takes and without a word.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mem_core.domain.environment import LockObservation
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.units import format_seconds
from mem_core.infrastructure.machine.build import find_stale_locks, remove_stale_locks
from mem_core.infrastructure.machine.process_facts import command_of

LAST_LINES = 15
LAST_CHARACTERS = 1_500
END_LIMIT_S = 5.0


@dataclass(frozen=True)
class BuildWatch:
    """How patient the owner is. `say_every_s`: how often it says what a build waits for; `deadline_s`: when it gives up."""

    deadline_s: float = 1_200.0
    say_every_s: float = 10.0
    look_every_s: float = 1.0


def build_command(names: Sequence[str]) -> list[str]:
    """What builds the named ops in a process that ends with this one."""
    return [sys.executable, "-P", "-m", "mem_core.runtime.deepspeed.programs.build_ops", str(os.getpid()), *names]


def watch_build(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, note: Callable[[str], None], watch: BuildWatch | None = None
) -> None:
    """Run a build to its end. Locks in `folder` whose holder dies meanwhile are removed; a living holder is named, again and again.

    Raises:
        EnvironmentUnfit: the build failed (with the compiler's last lines) or ran past its deadline (with who holds the lock).
    """
    watch = watch or BuildWatch()
    with tempfile.TemporaryFile() as said:  # no pipe: a compiler that is left could hold it open for ever
        builder = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(builder, folder, note, watch)
        finally:
            _end(builder)
        if builder.returncode != 0:
            raise EnvironmentUnfit(
                f"building DeepSpeed's ops failed: {_last_words(said)}", remedy="Mend the compiler named above, then start again."
            )


def _wait(builder: "subprocess.Popen[bytes]", folder: Path, note: Callable[[str], None], watch: BuildWatch) -> None:
    started_s = said_s = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            builder.wait(watch.look_every_s)
            return
        now_s = time.monotonic()
        for lock in remove_stale_locks(folder):
            note(f"removed a build lock whose holder has died: {lock}")
        left_s = started_s + watch.deadline_s - now_s
        holders = [_holder(lock) for lock in find_stale_locks(folder) if lock.owner_pid != builder.pid and not lock.stale]
        if left_s <= 0:
            raise EnvironmentUnfit(
                f"building DeepSpeed's ops took over {format_seconds(watch.deadline_s)}",
                value="; ".join(holders) or None,
                remedy=f"End who holds the lock under {folder} or let it finish, then start again.",
            )
        if holders and now_s - said_s >= watch.say_every_s and builder.poll() is None:  # what an ended one has left is nobody's
            said_s = now_s
            note(f"waiting for {'; '.join(holders)}; {format_seconds(left_s)} more at most")


def _holder(lock: LockObservation) -> str:
    """Who holds a lock, since when, and what it builds."""
    op = Path(lock.path).parent.name
    since = f"for {format_seconds(lock.age_s)}"
    if lock.owner_pid is None:
        return f"the lock of {op}, held {since} ({lock.reason})"
    return f"process {lock.owner_pid} ({command_of(lock.owner_pid)}), which has been building {op} {since}"


def _end(builder: "subprocess.Popen[bytes]") -> None:
    """End of file tells a builder that its owner is gone: it ends its compilers and itself. One that does not hear that is killed."""
    assert builder.stdin is not None
    builder.stdin.close()
    try:
        builder.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        builder.kill()
        builder.wait()


def _last_words(said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode("utf-8", "replace").strip().splitlines()[-LAST_LINES:]
    return " | ".join(lines)[-LAST_CHARACTERS:]
