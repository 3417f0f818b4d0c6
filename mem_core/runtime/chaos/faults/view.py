"""A run seen from outside: its processes by their marks in /proc, its heartbeats, its folder. Asks nothing of the run itself."""

import os
from dataclasses import dataclass
from pathlib import Path

from mem_core.core.run.lease import read_lease
from mem_core.infrastructure.machine.process_facts import start_ticks
from mem_core.infrastructure.settings import RUN_FOLDER_VARIABLE
from mem_core.runtime.ranks.local.heartbeat import HeartbeatReader
from mem_core.runtime.ranks.port import Heartbeat

PREFECT_PROGRAM = b"flows.server.embedded\0serve"


@dataclass(frozen=True)
class SeenProcess:
    """A process of the run. `role` is rank-N, writer-N, validator, fork-server, flow or prefect; pid and start name it for certain."""

    pid: int
    start: int
    role: str
    port: int | None = None

    def alive(self) -> bool:
        """Whether this very process is still there (a zombie is not)."""
        return start_ticks(self.pid) == self.start


@dataclass(frozen=True)
class Sign:
    """The newest heartbeat of rank 0: which try it belongs to and what it says."""

    source: Path
    beat: Heartbeat

    @property
    def steps(self) -> int:
        """Applied steps."""
        return self.beat.applied_steps


class RunView:
    """Looks at one run folder; remembers every process that was ever seen, so that left-overs can be named at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.seen: dict[tuple[int, int], SeenProcess] = {}
        self._reader: tuple[Path, HeartbeatReader] | None = None

    def processes(self) -> list[SeenProcess]:
        """Everything of this run that is alive now."""
        mark = f"{RUN_FOLDER_VARIABLE}={self.folder}".encode()
        found: list[SeenProcess] = []
        lease = read_lease(self.folder)
        flow_pid = lease.pid if lease is not None and start_ticks(lease.pid) == lease.start_ticks else None
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            start = start_ticks(pid)
            role, port = self._role(pid, mark, flow_pid) if start is not None else ("", None)
            if role and start is not None:
                found.append(SeenProcess(pid, start, role, port))
        self.seen.update({(process.pid, process.start): process for process in found})
        return found

    def find(self, role: str) -> list[SeenProcess]:
        """Living processes whose role is `role` or starts with `role` and a dash."""
        return sorted((p for p in self.processes() if p.role == role or p.role.startswith(f"{role}-")), key=lambda p: p.role)

    def _role(self, pid: int, mark: bytes, flow_pid: int | None) -> tuple[str, int | None]:
        if pid == flow_pid:
            return "flow", None
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if PREFECT_PROGRAM in command and _parent(pid) == flow_pid:
                return "prefect", int(command.rstrip(b"\0").split(b"\0")[-1])
            if mark not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return "", None
            output = os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
            leader = os.getsid(pid) == pid
        except (OSError, ValueError):
            return "", None
        if output.startswith("rank-"):
            rank = output.removesuffix(".log")
            return (rank if leader else rank.replace("rank", "writer")), None
        if output == "validator.log":
            return "validator", None
        return ("fork-server" if output.startswith("fork-server-") else "other"), None

    def sign(self) -> Sign | None:
        """Rank 0's newest heartbeat under the present holder, or None while there is none."""
        lease = read_lease(self.folder)
        tries = sorted((self.folder / "live" / str(lease.pid)).glob("try-*/rank-0.heartbeat")) if lease is not None else []
        if not tries:
            return None
        if self._reader is None or self._reader[0] != tries[-1]:
            self._reader = (tries[-1], HeartbeatReader(tries[-1]))
        beat = self._reader[1].read()
        return Sign(tries[-1], beat) if beat.beat_s else None

    def valid_checkpoints(self) -> list[Path]:
        """Folders with a manifest and a verdict, oldest first. Judged by name only: their content is the run's business."""
        found = (self.folder / "checkpoints").glob("step-*/verdict.json")
        return sorted(path.parent for path in found if (path.parent / "manifest.json").exists())

    def staged_files(self) -> list[Path]:
        """Engine files that are being written now."""
        return [path for path in (self.folder / "staging").glob("attempt-*/save-*/**/*") if path.is_file()]

    def leftovers(self) -> list[SeenProcess]:
        """Processes that were ever seen, or are marked as of this run, and still live."""
        self.processes()
        return [process for process in self.seen.values() if process.alive()]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def process_state(pid: int) -> str:
    """One letter of /proc/PID/stat: R, S, D, T (stopped), Z; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
