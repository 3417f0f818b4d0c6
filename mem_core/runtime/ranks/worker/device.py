"""The one device that a rank computes on. Everything in a rank that depends on which device that is asks here.

torch keeps a current device, a random generator for each device and counters for each device, and each of them silently means
device 0 where none is named: a rank that names its device in one place and forgets it in another trains on one and measures another.
"""

import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from mem_core.infrastructure.machine.memory_probe import HostProbe, MemoryProbe
from mem_core.infrastructure.machine.memory_probe_cuda import CudaProbe
from mem_core.infrastructure.machine.process_facts import memory_lines
from mem_core.runtime.memory.reader import DeviceReader, HostReader, MemoryReader
from mem_core.runtime.ranks.place import RankPlace


class LocalDevice(Protocol):
    """A rank's device. `kind` is what formulas and messages differ by, `torch_device` is where tensors go."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]: ...

    @property
    def torch_device(self) -> torch.device: ...

    def use(self) -> None:
        """Make it the process's current device. Once, before the process group exists."""
        ...

    def set_allocator(self, setting: str) -> None:
        """A setting of its caching allocator, before anything is allocated; no effect where there is none."""
        ...

    def seed(self, seed: int) -> None:
        """Seed every generator that operations of this rank draw from."""
        ...

    def memory_reader(self, budget_bytes: int | None) -> MemoryReader:
        """Readings of the memory that passes on this device use; `budget_bytes` is the user's own limit."""
        ...

    def probe(self) -> MemoryProbe:
        """Use and peak of that memory, by this process alone."""
        ...

    def release_free_memory(self) -> None:
        """Give what is free back to the system: collected objects, the allocator's cache, the C library's free pages."""
        ...

    def memory_summary(self) -> str:
        """Evidence on one line: the allocator's own counts, or what the kernel says of this process."""
        ...


class CpuDevice:
    """The host: all ranks of a machine share its memory."""

    kind: Literal["cpu", "cuda"] = "cpu"
    torch_device = torch.device("cpu")

    def use(self) -> None:
        """Nothing to choose."""

    def set_allocator(self, setting: str) -> None:
        """The C library's allocator knows no such setting."""

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def memory_reader(self, budget_bytes: int | None) -> MemoryReader:
        return HostReader(budget_bytes)

    def probe(self) -> MemoryProbe:
        return HostProbe(os.getpid())

    def release_free_memory(self) -> None:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # glibc only
            trim(0)

    def memory_summary(self) -> str:
        return f"process: {', '.join(memory_lines())}, python objects {len(gc.get_objects())}"


class CudaDevice:
    """One CUDA device of this machine. `cuda` is torch's module of that name, or something that stands in for it.

    `configure` takes settings of the caching allocator in the form of PYTORCH_ALLOC_CONF, which torch has read when it was imported.
    """

    kind: Literal["cpu", "cuda"] = "cuda"

    def __init__(
        self, index: int, cuda: Any = torch.cuda, configure: Callable[[str], None] = torch._C._accelerator_setAllocatorSettings
    ) -> None:
        self._configure = configure
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._cuda = cuda

    def use(self) -> None:
        self._cuda.set_device(self._index)

    def set_allocator(self, setting: str) -> None:
        self._configure(setting)

    def seed(self, seed: int) -> None:
        """The host's generator too: some operations draw there whatever device their tensors are on."""
        torch.default_generator.manual_seed(seed)
        self._cuda.default_generators[self._index].manual_seed(seed)

    def memory_reader(self, budget_bytes: int | None) -> MemoryReader:
        return DeviceReader(CudaProbe(self._index, self._cuda), budget_bytes)

    def probe(self) -> MemoryProbe:
        return CudaProbe(self._index, self._cuda)

    def release_free_memory(self) -> None:
        gc.collect()
        self._cuda.empty_cache()

    def memory_summary(self) -> str:
        stats = self._cuda.memory_stats(self._index)
        names = ("allocated_bytes.all", "active_bytes.all", "reserved_bytes.all", "inactive_split_bytes.all")
        counts = [f"{name.split('_')[0]} {stats[f'{name}.current']} (peak {stats[f'{name}.peak']})" for name in names]
        return f"allocator: {', '.join(counts)}, retries {stats['num_alloc_retries']}, failures {stats['num_ooms']}"


def cuda_is_there(cuda: Any = torch.cuda) -> bool:
    """Whether this process could compute on a CUDA device."""
    return bool(cuda.is_available())


def open_device(place: RankPlace, cuda: Any = torch.cuda) -> LocalDevice:
    """The device of a place."""
    return CpuDevice() if place.device_kind == "cpu" else CudaDevice(torch.device(place.device).index, cuda)
