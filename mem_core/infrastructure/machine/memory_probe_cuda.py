"""Readings of CUDA memory through torch and NVML, behind the same port as the host's. torch is imported on first use."""

import os
from dataclasses import dataclass
from typing import Any

from mem_core.domain.environment import MemoryBudget
from mem_core.infrastructure.machine.memory_probe import MemoryUsage


@dataclass(frozen=True, slots=True)
class CudaReading:
    """Everything that is known of one device's memory; bytes.

    `other_processes` is None where NVML cannot tell (containers often hide pids).
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    free_bytes: int
    total_bytes: int
    inactive_split_bytes: int
    alloc_retries: int
    num_ooms: int
    other_processes_bytes: int | None = None

    @property
    def fragmented_bytes(self) -> int:
        """Reserved by the allocator and not in use by tensors."""
        return self.reserved_bytes - self.allocated_bytes


class CudaProbe:
    """`MemoryProbe` of one device of this process.

    `usage` reads the allocator's own counters and never synchronises with the device. `cuda` stands in for torch's module of
    that name.
    """

    def __init__(self, device_index: int, cuda: Any = None) -> None:
        self._index = device_index
        self._given = cuda

    @property
    def _cuda(self) -> Any:
        if self._given is None:
            import torch

            self._given = torch.cuda
        return self._given

    def usage(self) -> MemoryUsage:
        stats = self._cuda.memory_stats(self._index)
        return MemoryUsage(
            kind="device",
            used_bytes=int(stats.get("allocated_bytes.all.current", 0)),
            peak_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
            mapped_bytes=int(stats.get("reserved_bytes.all.current", 0)),
            alloc_retries=int(stats.get("num_alloc_retries", 0)),
        )

    def reset_peak(self) -> None:
        self._cuda.reset_peak_memory_stats(self._index)

    def read(self) -> CudaReading:
        """Allocator, driver and neighbours. Asks the driver, so it is for segment boundaries rather than steps."""
        stats = self._cuda.memory_stats(self._index)
        free, total = self._cuda.mem_get_info(self._index)
        return CudaReading(
            allocated_bytes=int(stats.get("allocated_bytes.all.current", 0)),
            reserved_bytes=int(stats.get("reserved_bytes.all.current", 0)),
            peak_allocated_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
            peak_reserved_bytes=int(stats.get("reserved_bytes.all.peak", 0)),
            free_bytes=free,
            total_bytes=total,
            inactive_split_bytes=int(stats.get("inactive_split_bytes.all.current", 0)),
            alloc_retries=int(stats.get("num_alloc_retries", 0)),
            num_ooms=int(stats.get("num_ooms", 0)),
            other_processes_bytes=other_processes_bytes(self._nvml_index()),
        )

    def budget(self, own_bytes: int | None = None) -> MemoryBudget:
        return device_budget(self.read(), own_bytes, name=f"device {self._index} free")

    def _nvml_index(self) -> str | int:
        """NVML counts all devices of the machine, torch those that CUDA_VISIBLE_DEVICES shows: the UUID fits both."""
        uuid = getattr(self._cuda.get_device_properties(self._index), "uuid", None)
        return f"GPU-{uuid}" if uuid is not None else self._index


def device_budget(reading: CudaReading, own_bytes: int | None = None, name: str = "device free") -> MemoryBudget:
    """Most bytes that this process may reserve: what it has plus what the driver says is free, or the user's own budget."""
    limits = {name: reading.reserved_bytes + reading.free_bytes}
    if own_bytes is not None:
        limits["memory.budget"] = own_bytes
    binding = min(limits, key=lambda limit: limits[limit])
    return MemoryBudget(kind="device", budget_bytes=limits[binding], binding_limit=binding, limits_bytes=limits)


def other_processes_bytes(device: str | int) -> int | None:
    """Device memory that other processes hold, through NVML; None where that cannot be told."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(device) if isinstance(device, str) else pynvml.nvmlDeviceGetHandleByIndex(device)
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    if any(process.usedGpuMemory is None for process in processes):
        return None
    return sum(int(process.usedGpuMemory) for process in processes if process.pid != os.getpid())
