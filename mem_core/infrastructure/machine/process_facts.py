"""Small facts about processes and their logs, read from /proc and the disk."""

import os
from pathlib import Path

from mem_core.domain.errors import EnvironmentUnfit
from mem_core.infrastructure.storage.reading import open_regular

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int | None) -> float:
    """User and system CPU time of a process in seconds; 0 when it is gone or unknown."""
    if pid is None:
        return 0.0
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def active_seconds(pid: int | None) -> float:
    """Seconds that a process's threads have computed or waited for a core; 0 when it is gone or unknown.

    A starved process gets next to no CPU time and is all the same at work: the time it stood in a run queue tells it from one
    that waits for nothing to come. Kernels without schedstat give CPU time alone.
    """
    total_ns = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            computed_ns, queued_ns, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
            total_ns += int(computed_ns) + int(queued_ns)
    except (OSError, ValueError):
        return cpu_seconds(pid)
    return total_ns / 1e9


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, which with its pid names it; None when there is no such process.

    A zombie counts as gone: it will never write again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def memory_lines() -> tuple[str, ...]:
    """What the kernel says of this process's memory and threads, a fact a line."""
    with open("/proc/self/status", encoding="ascii") as file:
        return tuple(" ".join(line.split()) for line in file if line.startswith(("Vm", "Rss", "Threads")))


def command_of(pid: int, max_characters: int = 120) -> str:
    """The command line of a process, cut to a readable length; empty when it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode("utf-8", "replace") for word in words)[:max_characters]


def boot_id() -> str:
    """Identity of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Identity of the namespace that this process's pid counts in, such as `pid:[4026531836]`; empty where the system tells none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def tail(path: Path, num_lines: int, max_bytes: int = 16_384) -> tuple[str, ...]:
    """The last lines of a log; empty when there is none."""
    try:
        with open_regular(path) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - max_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-num_lines:])


def refuse_lost_working_folder() -> None:
    """Every worker starts in the folder that this process stands in; one that is gone kills each of them without a word.

    Raises:
        EnvironmentUnfit: it was deleted, moved out of reach or cannot be entered any more.
    """
    try:
        stands = os.getcwd()
        os.stat(stands)
    except OSError as exc:
        raise EnvironmentUnfit(
            "the working folder is gone",
            value=_last_known_folder(),
            remedy=f"Go to a folder that exists and give the command there ({exc.strerror}).",
        ) from exc


def _last_known_folder() -> str:
    try:
        return os.readlink("/proc/self/cwd")
    except OSError:
        return "its name is not known any more"
