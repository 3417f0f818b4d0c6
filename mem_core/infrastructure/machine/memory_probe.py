"""Readings of memory, host and device, behind one port; and the budget that follows from the tightest limit.

Two units must not be mixed: RLIMIT_AS and RLIMIT_DATA count address space (VmSize, VmData) per process, control groups and
MemAvailable count resident pages of all processes together. Everything is brought to "used + what may still be taken".
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self

from mem_core.domain.environment import MemoryBudget
from mem_core.infrastructure.machine.cgroups import CgroupFolders, CgroupLevel, memory_cgroup_folders, read_levels

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """What one process uses of one kind of memory, in bytes.

    host: `used` is resident memory, `peak` its highest value since the last reset, `mapped` the address space.
    device: `used` is what tensors hold, `peak` its highest value, `mapped` what the caching allocator holds.
    """

    kind: Literal["host", "device"]
    used_bytes: int
    peak_bytes: int
    mapped_bytes: int
    alloc_retries: int = 0


class MemoryProbe(Protocol):
    """One process's memory of one kind. `usage` and `reset_peak` are cheap enough for every step; `budget` is not."""

    def usage(self) -> MemoryUsage:
        """What is used now."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak from what is used now."""
        ...

    def budget(self, own_bytes: int | None = None) -> MemoryBudget:
        """Most bytes that the watched processes together may use, by the tightest limit; `own_bytes` is the user's."""
        ...


class ProcessMeter:
    """Resident memory, its peak and the address space of one process, through open /proc files (a few microseconds each).

    Opened by pid: after a fork an inherited `/proc/self` file would still tell about the parent.
    Raises ProcessLookupError from readings once the process is gone.
    """

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        folder = root / "proc" / str(pid)
        self._statm = os.open(folder / "statm", os.O_RDONLY | os.O_CLOEXEC)
        self._status = os.open(folder / "status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._clear: int | None = os.open(folder / "clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self._clear = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; the meter is of no use afterwards. Closing twice is harmless."""
        for descriptor in (self._statm, self._status, self._clear):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._statm = self._status = -1
        self._clear = None

    def mapped_and_resident_bytes(self) -> tuple[int, int]:
        """(address space, resident memory) of one instant: what RLIMIT_AS counts, and what control groups count."""
        text = os.pread(self._statm, 64, 0)
        if not text:
            raise ProcessLookupError("the process is gone")
        mapped, resident = text.split(None, 2)[:2]
        return int(mapped) * _PAGE_BYTES, int(resident) * _PAGE_BYTES

    def resident_bytes(self) -> int:
        """Resident memory."""
        return self.mapped_and_resident_bytes()[1]

    def address_space_bytes(self) -> int:
        """Address space."""
        return self.mapped_and_resident_bytes()[0]

    def peak_resident_bytes(self) -> int:
        """Highest resident memory since the last reset (VmHWM)."""
        return self._status_bytes(b"VmHWM:")

    def peak_address_space_bytes(self) -> int:
        """Most address space ever (VmPeak); no reset brings it down."""
        return self._status_bytes(b"VmPeak:")

    def data_bytes(self) -> int:
        """Private writable mappings: what RLIMIT_DATA counts (VmData)."""
        return self._status_bytes(b"VmData:")

    def reset_peak(self) -> bool:
        """Let the peak start again from now; False where the kernel does not allow it (then the peak is of the whole life)."""
        if self._clear is None:
            return False
        try:
            os.pwrite(self._clear, b"5", 0)
        except OSError:
            return False
        return True

    def _status_bytes(self, key: bytes) -> int:
        text = os.pread(self._status, 8_192, 0)
        if not text:
            raise ProcessLookupError("the process is gone")
        start = text.find(key)
        return int(text[start + len(key) : text.index(b"\n", start)].split()[0]) * 1024 if start >= 0 else 0


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """Limits of the host as one group of processes meets them.

    Costs about half a millisecond: for segment boundaries and every few seconds, not for every step.
    """

    used_bytes: int
    available_bytes: int
    cgroups: tuple[CgroupLevel, ...] = ()
    rlimit_headroom_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    num_processes: int = 1

    @property
    def oom_kills(self) -> int:
        """Kills by the kernel's OOM killer in these groups so far; an increase means that one of them has just happened."""
        return sum(level.oom_kills for level in self.cgroups)


def memory_budget(snapshot: HostSnapshot, own_bytes: int | None = None) -> MemoryBudget:
    """Most resident bytes that the watched processes together may use: the least over all limits, which is named.

    Each limit is "used + headroom". An address-space limit holds per process, so its smallest headroom counts once for each.
    """
    used = snapshot.used_bytes
    limits = {"MemAvailable": used + snapshot.available_bytes}
    limits |= {level.name: used + level.headroom_bytes for level in snapshot.cgroups if level.headroom_bytes is not None}
    limits |= {name: used + headroom * snapshot.num_processes for name, headroom in snapshot.rlimit_headroom_bytes.items()}
    if own_bytes is not None:
        limits["memory.budget"] = own_bytes
    binding = min(limits, key=lambda name: limits[name])
    return MemoryBudget(kind="host", budget_bytes=max(0, limits[binding]), binding_limit=binding, limits_bytes=limits)


def take_snapshot(
    pids: Iterable[int], root: Path = Path("/"), *, proportional: bool = False, folders: CgroupFolders | None = None
) -> HostSnapshot:
    """Read every host limit for these processes; those that are gone count as nothing.

    `folders` are the control groups of the processes where they are known already (finding them is half of the cost).
    `proportional` counts shared pages once over all processes (PSS) instead of once in each (RSS): exact for forked workers,
    but about 15 ms per process with a large heap.
    """
    alive = [reading for pid in pids if (reading := _read_process(pid, root, proportional=proportional)) is not None]
    headroom: dict[str, int] = {}
    for reading in alive:
        for name, left in reading.rlimit_headroom_bytes.items():
            headroom[name] = min(left, headroom.get(name, left))
    first = alive[0].pid if alive else os.getpid()
    return HostSnapshot(
        used_bytes=sum(reading.used_bytes for reading in alive),
        available_bytes=available_bytes(root),
        cgroups=read_levels(memory_cgroup_folders(first, root) if folders is None else folders, root),
        rlimit_headroom_bytes=headroom,
        num_processes=max(1, len(alive)),
    )


def available_bytes(root: Path = Path("/")) -> int:
    """MemAvailable: what the kernel thinks can be taken without swapping. 0 when it does not say."""
    return _meminfo(root).get("MemAvailable", 0)


def _meminfo(root: Path) -> dict[str, int]:
    try:
        lines = (root / "proc" / "meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs if len(words) >= 2 and words[1].isdigit()}


def proportional_bytes(pid: int, root: Path = Path("/")) -> int:
    """PSS: private pages plus this process's share of shared ones. Raises OSError when the process is gone or denied."""
    for line in (root / "proc" / str(pid) / "smaps_rollup").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def address_space_rlimits(pid: int | Literal["self"] = "self", root: Path = Path("/")) -> dict[str, int]:
    """Soft RLIMIT_AS and RLIMIT_DATA of a process in bytes; limits that are not set are left out."""
    return _soft_limits({"Max address space": "RLIMIT_AS", "Max data size": "RLIMIT_DATA"}, pid, root)


def file_size_rlimit(pid: int | Literal["self"] = "self", root: Path = Path("/")) -> int | None:
    """Soft RLIMIT_FSIZE of a process in bytes (`ulimit -f`); None where it is not set."""
    return _soft_limits({"Max file size": "RLIMIT_FSIZE"}, pid, root).get("RLIMIT_FSIZE")


def _soft_limits(names: Mapping[str, str], pid: int | Literal["self"], root: Path) -> dict[str, int]:
    try:
        lines = (root / "proc" / str(pid) / "limits").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, int] = {}
    for line in lines:
        for label, name in names.items():
            soft = line[len(label) :].split()[0] if line.startswith(label) else ""
            if soft.isdigit():
                found[name] = int(soft)
    return found


@dataclass(frozen=True, slots=True)
class _ProcessReading:
    pid: int
    used_bytes: int
    rlimit_headroom_bytes: Mapping[str, int]


def _read_process(pid: int, root: Path, *, proportional: bool) -> _ProcessReading | None:
    try:
        with ProcessMeter(pid, root) as meter:
            used = proportional_bytes(pid, root) if proportional else meter.resident_bytes()
            mapped = {"RLIMIT_AS": meter.address_space_bytes(), "RLIMIT_DATA": meter.data_bytes()}
    except (OSError, ValueError):
        return None
    limits = address_space_rlimits(pid, root)
    return _ProcessReading(pid, used, {name: max(0, limit - mapped[name]) for name, limit in limits.items()})


class HostProbe:
    """`MemoryProbe` for host memory: usage of one process, budget of it and its `peers` (the other ranks of the node)."""

    def __init__(self, pid: int, peers: Iterable[int] = (), root: Path = Path("/")) -> None:
        self._pids = tuple(dict.fromkeys((pid, *peers)))
        self._root = root
        self._meter = ProcessMeter(pid, root)
        self._folders = memory_cgroup_folders(pid, root)

    def usage(self) -> MemoryUsage:
        mapped, used = self._meter.mapped_and_resident_bytes()
        return MemoryUsage(kind="host", used_bytes=used, peak_bytes=self._meter.peak_resident_bytes(), mapped_bytes=mapped)

    def reset_peak(self) -> None:
        self._meter.reset_peak()

    def snapshot(self) -> HostSnapshot:
        """All host limits for the watched processes."""
        return take_snapshot(self._pids, self._root, folders=self._folders)

    def budget(self, own_bytes: int | None = None) -> MemoryBudget:
        return memory_budget(self.snapshot(), own_bytes)

    def close(self) -> None:
        """Close the probe's files."""
        self._meter.close()
