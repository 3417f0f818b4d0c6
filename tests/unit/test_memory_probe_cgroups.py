"""Memory limits of cgroups v1, v2 and hybrid, in containers and out of them, from fake file roots; and real ones where allowed."""

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from mem_core.infrastructure.machine.cgroups import CgroupLevel, cpu_quota, memory_cgroups, pids_left

GIB = 2**30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def tightest(levels: tuple[CgroupLevel, ...]) -> CgroupLevel:
    return min((level for level in levels if level.headroom_bytes is not None), key=lambda level: level.headroom_bytes or 0)


def test_v2_the_groups_own_limit_is_seen(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/app\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/app/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/app/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n",
            "sys/fs/cgroup/app/memory.events": "low 0\noom 3\noom_kill 2\n",
        },
    )
    (level,) = memory_cgroups("self", root)
    assert level == CgroupLevel("cgroup v2 /sys/fs/cgroup/app", 2 * GIB, GIB - GIB // 4, 2)
    assert level.headroom_bytes == 2 * GIB - (GIB - GIB // 4)


def test_v2_a_tighter_ancestor_binds(tmp_path: Path) -> None:
    """systemd puts the limit on the slice, not on the scope that the process is in."""
    root = write(
        tmp_path,
        {
            "proc/9/cgroup": "0::/user.slice/run.scope\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/run.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/run.scope/memory.current": "100\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{GIB // 2}\n",
        },
    )
    levels = memory_cgroups(9, root)
    assert [level.limit_bytes for level in levels] == [None, GIB]
    assert tightest(levels).name == "cgroup v2 /sys/fs/cgroup/user.slice"
    assert tightest(levels).headroom_bytes == GIB // 2


def test_v2_memory_high_counts_as_a_limit(tmp_path: Path) -> None:
    """Above memory.high the kernel throttles until nothing moves: as good as a limit."""
    files = {"memory.max": f"{4 * GIB}", "memory.high": f"{GIB}", "memory.current": "0"}
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT}
        | {f"sys/fs/cgroup/a/{name}": text for name, text in files.items()},
    )
    assert memory_cgroups("self", root)[0].limit_bytes == GIB


def test_v1_limit_and_page_cache_of_the_whole_subtree(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "8:memory:/job\n1:cpu,cpuacct:/job\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        },
    )
    own, top = memory_cgroups("self", root)
    assert (own.limit_bytes, own.working_set_bytes, own.oom_kills) == (3 * GIB, GIB, 4)
    assert top.limit_bytes is None


def test_v1_in_a_container_the_path_from_outside_maps_to_the_mount_point(tmp_path: Path) -> None:
    """Docker without a cgroup namespace: /proc/self/cgroup has the host's path, of which only the part below is mounted."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "8:memory:/docker/abc\n",
            "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
        },
    )
    assert [level.limit_bytes for level in memory_cgroups("self", root)] == [GIB]


@pytest.mark.parametrize("path", ["/", "/../../system.slice", "/not/mounted/here"])
def test_v2_namespaces_fall_back_to_the_mount_point(tmp_path: Path, path: str) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert [level.limit_bytes for level in memory_cgroups("self", root)] == [GIB]


def test_hybrid_layout_takes_the_version_that_has_the_controller(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "8:memory:/j\n0::/j\n",
            "proc/self/mountinfo": V1_MOUNTS + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory/j/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/j/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/unified/j/cgroup.procs": "\n",
        },
    )
    assert [level.limit_bytes for level in memory_cgroups("self", root)] == [GIB]


def test_no_cgroups_at_all_is_no_limit(tmp_path: Path) -> None:
    assert memory_cgroups("self", tmp_path) == ()
    assert pids_left("self", tmp_path) is None
    assert cpu_quota("self", tmp_path) is None


def test_pids_and_cpu_limits_of_both_versions(tmp_path: Path) -> None:
    v2 = write(
        tmp_path / "two",
        {
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/a/pids.max": "30\n",
            "sys/fs/cgroup/a/pids.current": "10\n",
            "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )
    v1 = write(
        tmp_path / "one",
        {
            "proc/self/cgroup": "9:pids:/a\n2:cpu,cpuacct:/a\n",
            "proc/self/mountinfo": V1_MOUNTS,
            "sys/fs/cgroup/pids/a/pids.max": "max\n",
            "sys/fs/cgroup/pids/pids.max": "7\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        },
    )
    assert (pids_left("self", v2), cpu_quota("self", v2)) == (20, 1.5)
    assert (pids_left("self", v1), cpu_quota("self", v1)) == (7, 0.5)


def _own_v1_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.split(":")[1] == "memory":
            return Path("/sys/fs/cgroup/memory") / line.split(":")[2].lstrip("/")
    return Path("/nonexistent")


def test_a_real_cgroup_v1_limit_is_read_and_binds() -> None:
    """A process inside a real 300 MiB group must see that limit."""
    group = _own_v1_group() / f"mem-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no writable cgroup v1 memory controller here: {exc}")
    code = (
        "import os, pathlib, sys\n"
        "group = pathlib.Path(sys.argv[1])\n"
        "(group / 'cgroup.procs').write_text(str(os.getpid()))\n"
        "from mem_core.infrastructure.machine.memory_probe import memory_budget, take_snapshot\n"
        "budget = memory_budget(take_snapshot([os.getpid()]))\n"
        "print(budget.budget_bytes, budget.binding_limit)\n"
    )
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 * 2**20))
        done = subprocess.run([sys.executable, "-c", code, str(group)], capture_output=True, text=True, timeout=60, check=True)
    finally:
        group.rmdir()
    size, _, name = done.stdout.strip().partition(" ")
    assert 0 < int(size) <= 400 * 2**20
    assert group.name in name
