"""How a process is tied to the one that started it, and how dear it is to the kernel. The standard library alone.

The first statement of a child asks for its parent's death signal, so nothing slow to import may stand here.
"""

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel for that signal when the parent dies, and leave at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(3)


def first_to_be_killed() -> None:
    """Offer this process to the kernel's OOM killer before any other; for children whose loss costs little."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
