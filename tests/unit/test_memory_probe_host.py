"""Host memory readings against what the process really does, and the budget that follows from them."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mem_core.infrastructure.machine.cgroups import CgroupLevel
from mem_core.infrastructure.machine.memory_probe import (
    HostProbe,
    HostSnapshot,
    ProcessMeter,
    address_space_rlimits,
    available_bytes,
    memory_budget,
    proportional_bytes,
    take_snapshot,
)

MIB = 2**20
GIB = 2**30


def test_resident_and_peak_follow_a_real_allocation() -> None:
    with ProcessMeter(os.getpid()) as meter:
        if not meter.reset_peak():
            pytest.skip("this kernel does not allow resetting VmHWM")
        before = meter.resident_bytes()
        block = bytearray(64 * MIB)
        block[::4096] = b"x" * len(block[::4096])
        assert meter.resident_bytes() - before > 56 * MIB
        del block
        assert meter.peak_resident_bytes() - before > 56 * MIB
        meter.reset_peak()
        assert meter.peak_resident_bytes() - before < 32 * MIB


def test_address_space_is_larger_than_what_is_resident() -> None:
    with ProcessMeter(os.getpid()) as meter:
        assert meter.address_space_bytes() > meter.resident_bytes() > MIB
        assert 0 < meter.data_bytes() <= meter.address_space_bytes()


def test_shared_pages_count_once_in_proportional_memory() -> None:
    with ProcessMeter(os.getpid()) as meter:
        assert 0 < proportional_bytes(os.getpid()) <= meter.resident_bytes() + MIB


def test_a_process_that_is_gone_raises_and_counts_as_nothing_in_a_snapshot() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meter = ProcessMeter(child.pid)
    assert meter.resident_bytes() > 0
    child.communicate(b"\n", timeout=30)
    for reading in (meter.peak_resident_bytes, meter.resident_bytes):
        with pytest.raises(ProcessLookupError):
            reading()
    meter.close()
    meter.close()
    assert take_snapshot([child.pid]).used_bytes == 0


def test_rlimits_of_a_real_process_are_read_and_bind_in_address_space() -> None:
    """RLIMIT_AS set in a child: the headroom is the limit less VmSize, not less the resident memory."""
    code = (
        "import os, resource\n"
        "from mem_core.infrastructure.machine.memory_probe import ProcessMeter, memory_budget, take_snapshot\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({GIB}, {GIB}))\n"
        "with ProcessMeter(os.getpid()) as meter:\n"
        "    budget = memory_budget(take_snapshot([os.getpid()]))\n"
        "    print(budget.binding_limit, budget.budget_bytes, meter.resident_bytes(), meter.address_space_bytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    name, *numbers = done.stdout.split()
    budget_bytes, resident, mapped = map(int, numbers)
    assert name == "RLIMIT_AS"
    assert abs(budget_bytes - (GIB - mapped + resident)) < 8 * MIB


def test_limits_that_are_not_set_are_left_out() -> None:
    expected = {
        name
        for name, kind in (("RLIMIT_AS", resource.RLIMIT_AS), ("RLIMIT_DATA", resource.RLIMIT_DATA))
        if resource.getrlimit(kind)[0] != resource.RLIM_INFINITY
    }
    assert set(address_space_rlimits()) == expected


def test_available_memory_is_read_from_the_given_root(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   42 kB\n")
    assert available_bytes(tmp_path) == 42 * 1024
    assert available_bytes(tmp_path / "nowhere") == 0
    assert available_bytes() > 0


def snapshot(**changes: object) -> HostSnapshot:
    values: dict[str, object] = {"used_bytes": 1 * GIB, "available_bytes": 20 * GIB}
    return HostSnapshot(**(values | changes))  # pyright: ignore[reportArgumentType]


def test_the_budget_is_used_plus_headroom_of_the_tightest_limit() -> None:
    assert memory_budget(snapshot()).budget_bytes == 21 * GIB
    groups = (CgroupLevel("cgroup v2 /a", 4 * GIB, 3 * GIB, 0), CgroupLevel("cgroup v2 /", None, 9 * GIB, 0))
    budget = memory_budget(snapshot(cgroups=groups))
    assert (budget.budget_bytes, budget.binding_limit) == (2 * GIB, "cgroup v2 /a")


def test_a_per_process_limit_counts_once_for_each_process() -> None:
    budget = memory_budget(snapshot(rlimit_headroom_bytes={"RLIMIT_AS": GIB}, num_processes=2))
    assert (budget.budget_bytes, budget.binding_limit) == (3 * GIB, "RLIMIT_AS")


def test_the_users_own_budget_binds_when_it_is_least() -> None:
    assert memory_budget(snapshot(), own_bytes=GIB).binding_limit == "memory.budget"
    assert memory_budget(snapshot(), own_bytes=50 * GIB).binding_limit == "MemAvailable"


def test_every_limit_seen_is_reported() -> None:
    budget = memory_budget(snapshot(rlimit_headroom_bytes={"RLIMIT_DATA": GIB}), own_bytes=GIB)
    assert set(budget.limits_bytes) == {"MemAvailable", "RLIMIT_DATA", "memory.budget"}


def test_an_oom_kill_in_any_group_is_counted() -> None:
    groups = (CgroupLevel("a", None, 0, 2), CgroupLevel("b", None, 0, 3))
    assert snapshot(cgroups=groups).oom_kills == 5


def test_the_host_probe_watches_its_process() -> None:
    probe = HostProbe(os.getpid())
    probe.reset_peak()
    usage = probe.usage()
    assert usage.kind == "host"
    assert usage.mapped_bytes >= usage.peak_bytes >= usage.used_bytes - 8 * MIB
    assert probe.budget().budget_bytes > usage.used_bytes
    assert probe.budget(own_bytes=1).binding_limit == "memory.budget"
    probe.close()
