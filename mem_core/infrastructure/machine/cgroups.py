"""Memory limits of control groups, version 1 and 2, along the own path up to the root: any ancestor can bind."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

# Version 1 writes "no limit" as the largest page-aligned 64-bit number; anything near it is no limit either.
_NO_LIMIT = 2**60
_Version = Literal["v1", "v2"]
CgroupFolders = tuple[tuple[_Version, Path], ...]


@dataclass(frozen=True, slots=True)
class CgroupLevel:
    """One group on the way up. `limit_bytes` is None without a limit.

    `working_set_bytes` is the usage less inactive page cache, which the kernel drops before it kills anyone.
    """

    name: str
    limit_bytes: int | None
    working_set_bytes: int
    oom_kills: int

    @property
    def headroom_bytes(self) -> int | None:
        """What may still be taken; None without a limit."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.working_set_bytes)


def memory_cgroups(pid: int | Literal["self"] = "self", root: Path = Path("/")) -> tuple[CgroupLevel, ...]:
    """Every memory group that holds the process, innermost first; empty where there are none.

    `root` stands in for `/` in tests. Groups that vanish or deny reading are left out.
    """
    return read_levels(memory_cgroup_folders(pid, root), root)


def read_levels(folders: CgroupFolders, root: Path = Path("/")) -> tuple[CgroupLevel, ...]:
    """Readings of folders that `memory_cgroup_folders` found; a process rarely moves, so they may be kept."""
    return tuple(level for version, folder in folders if (level := read_level(version, folder, root)) is not None)


def memory_cgroup_folders(pid: int | Literal["self"] = "self", root: Path = Path("/")) -> CgroupFolders:
    """(version, folder) of each group on the way up, innermost first. The hybrid layout has both versions; each is looked at."""
    return _folders("memory", pid, root)


def read_level(version: _Version, folder: Path, root: Path = Path("/")) -> CgroupLevel | None:
    """Limit, working set and OOM kills of one group; None where its files are missing (a v2 root has none)."""
    name = f"cgroup {version} /{folder.relative_to(root)}"
    if version == "v2":
        current = _number(folder / "memory.current")
        limits = [limit for limit in (_number(folder / "memory.max"), _number(folder / "memory.high")) if limit is not None]
        inactive, kills = _keyed(folder / "memory.stat", "inactive_file"), _keyed(folder / "memory.events", "oom_kill")
    else:
        current = _number(folder / "memory.usage_in_bytes")
        limit = _number(folder / "memory.limit_in_bytes")
        limits = [limit] if limit is not None and limit < _NO_LIMIT else []
        inactive, kills = _keyed(folder / "memory.stat", "total_inactive_file"), _keyed(folder / "memory.oom_control", "oom_kill")
    if current is None and not limits:
        return None
    return CgroupLevel(name, min(limits, default=None), max(0, (current or 0) - inactive), kills)


class KillCounter:
    """Kills by the kernel's OOM killer in a process's groups since it was first seen there; it may be gone when this is asked."""

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._pid, self._root = pid, root
        self._path: str | None = None
        self._before: dict[tuple[_Version, Path], int] = {}
        self.follow()

    def follow(self) -> None:
        """Watch the groups that the process is in now as well: it may be moved, and one that ends is moved to the root by the kernel."""
        path = _text(self._root / "proc" / str(self._pid) / "cgroup")
        if not path or path == self._path:
            return
        self._path = path
        for folder in memory_cgroup_folders(self._pid, self._root):
            self._before.setdefault(folder, self._count(folder))

    def kills(self) -> int:
        """How many more there are now."""
        return sum(self._count(folder) - before for folder, before in self._before.items())

    def _count(self, folder: tuple[_Version, Path]) -> int:
        return sum(level.oom_kills for level in read_levels((folder,), self._root))


def pids_left(pid: int | Literal["self"] = "self", root: Path = Path("/")) -> int | None:
    """Processes and threads that the tightest pids group still allows; None without a limit."""
    left: list[int] = []
    for _, folder in _folders("pids", pid, root):
        limit = _number(folder / "pids.max")
        if limit is not None:
            left.append(max(0, limit - (_number(folder / "pids.current") or 0)))
    return min(left, default=None)


def cpu_quota(pid: int | Literal["self"] = "self", root: Path = Path("/")) -> float | None:
    """Cores that the tightest CPU quota allows; None without one."""
    quotas = [_read_quota(version, folder) for version, folder in _folders("cpu", pid, root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _folders(controller: str, pid: int | Literal["self"], root: Path) -> CgroupFolders:
    """Every existing folder of the process's groups with this controller, innermost first."""
    mounts = _mounts(root, controller)
    found: list[tuple[_Version, Path]] = []
    for version, path in _own_paths(pid, root, controller).items():
        if version in mounts:
            point, mount_root = mounts[version]
            found.extend((version, root / point.lstrip("/") / relative) for relative in _upwards(path, mount_root))
    return tuple((version, folder) for version, folder in found if folder.is_dir())


def _read_quota(version: _Version, folder: Path) -> float | None:
    if version == "v2":
        words = (_text(folder / "cpu.max") or "max").split()
        return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _own_paths(pid: int | Literal["self"], root: Path, controller: str) -> dict[_Version, str]:
    """The process's group in each hierarchy that can have the controller."""
    paths: dict[_Version, str] = {}
    for line in (_text(root / "proc" / str(pid) / "cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths["v2"] = path
        elif controller in controllers.split(","):
            paths["v1"] = path
    return paths


def _mounts(root: Path, controller: str) -> dict[_Version, tuple[str, str]]:
    """(mount point, root inside the hierarchy) of each version, from mountinfo; the usual places where that cannot be read."""
    text = _text(root / "proc" / "self" / "mountinfo")
    if text is None:
        return {"v2": ("/sys/fs/cgroup", "/"), "v1": (f"/sys/fs/cgroup/{controller}", "/")}
    found: dict[_Version, tuple[str, str]] = {}
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            found.setdefault("v2", (fields[4], fields[3]))
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            found.setdefault("v1", (fields[4], fields[3]))
    return found


def _upwards(path: str, mount_root: str) -> list[str]:
    """Paths relative to the mount point, innermost first, ending with "" (the mount point itself).

    A container may see its group's path from outside its namespace (`/../..`) or below the part that is mounted; then only
    the mount point can be read, and it is the right one.
    """
    prefix = mount_root.rstrip("/")
    inside = path.removeprefix(prefix) if path == prefix or path.startswith(prefix + "/") else ""
    parts = PurePosixPath(inside.lstrip("/")).parts
    if ".." in parts:
        parts = ()
    return ["/".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """The number in a one-line file; None for "max", for a missing file, and for anything else."""
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _keyed(path: Path, key: str) -> int:
    """The number after `key` in a file of "key number" lines; 0 when it is not there."""
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0
