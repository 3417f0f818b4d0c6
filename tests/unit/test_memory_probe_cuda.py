"""The device side of the memory port: the budget's arithmetic everywhere, real readings where there is a GPU."""

import pytest

from mem_core.infrastructure.machine.memory_probe_cuda import CudaProbe, CudaReading, device_budget, other_processes_bytes

GIB = 2**30


def reading(**changes: int) -> CudaReading:
    values = {
        "allocated_bytes": 10 * GIB,
        "reserved_bytes": 12 * GIB,
        "peak_allocated_bytes": 11 * GIB,
        "peak_reserved_bytes": 12 * GIB,
        "free_bytes": 60 * GIB,
        "total_bytes": 80 * GIB,
        "inactive_split_bytes": GIB,
        "alloc_retries": 0,
        "num_ooms": 0,
    }
    return CudaReading(**(values | changes))


def test_a_neighbours_memory_is_not_ours_to_use() -> None:
    """80 GiB in all, of which a neighbour holds 8: the budget is what we hold plus what is free."""
    assert device_budget(reading()).budget_bytes == 72 * GIB
    assert device_budget(reading(free_bytes=0)).budget_bytes == 12 * GIB


def test_own_budget_on_the_device() -> None:
    assert device_budget(reading(), own_bytes=GIB).binding_limit == "memory.budget"


def test_fragmentation_is_reserved_less_allocated() -> None:
    assert reading().fragmented_bytes == 2 * GIB


@pytest.mark.gpu
def test_real_readings_follow_a_real_allocation() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    probe = CudaProbe(0)
    torch.cuda.init()
    before = probe.usage().used_bytes
    block = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    assert probe.usage().used_bytes - before >= GIB
    full = probe.read()
    assert full.total_bytes >= full.free_bytes + full.reserved_bytes
    assert probe.budget().budget_bytes > GIB
    del block
    assert probe.usage().peak_bytes - before >= GIB
    probe.reset_peak()
    assert probe.usage().peak_bytes - before < GIB


def test_neighbours_are_unknown_without_nvml() -> None:
    """No driver, no answer; never an exception on the way to a step."""
    assert other_processes_bytes(10_000) is None
