"""What a rank reads of its memory at step boundaries, and every limit brought to one form.

A reading of the host costs about 25 microseconds (VmHWM needs the whole status file), limits cost half a millisecond: the
first is taken at every step only where memory is near a limit, the second about once a second.
"""

import os
import time
from typing import Protocol

from mem_core.core.memory.start import Limit
from mem_core.infrastructure.machine.memory_probe import ProcessMeter, take_snapshot
from mem_core.infrastructure.machine.memory_probe_cuda import CudaProbe
from mem_core.runtime.ranks.agreement import RankReading

REFRESH_S = 1.0


class MemoryReader(Protocol):
    """One rank's memory of the kind that its passes use."""

    def read(self) -> RankReading:
        """Bytes now and at the peak since the last call."""
        ...

    def limits(self, ranks: list[RankReading]) -> list[Limit]:
        """Every limit, against what all ranks of this machine use under it."""
        ...


class HostReader:
    """Resident memory and address space. Limits of resident memory are shared by all ranks, address space is each rank's own."""

    def __init__(self, budget_bytes: int | None) -> None:
        self._pid = os.getpid()
        self._budget_bytes = budget_bytes
        self._meter = ProcessMeter(self._pid)
        self._shared: dict[str, int] = {}
        self._own: dict[str, int] = {}
        self._refreshed_s = 0.0

    def read(self) -> RankReading:
        peak = self._meter.peak_resident_bytes()
        mapped, used = self._meter.mapped_and_resident_bytes()
        self._meter.reset_peak()
        return RankReading(used_bytes=used, peak_bytes=max(peak, used), mapped_bytes=mapped)

    def limits(self, ranks: list[RankReading]) -> list[Limit]:
        used, peak = sum(rank.used_bytes for rank in ranks), sum(rank.peak_bytes for rank in ranks)
        now = time.monotonic()
        if now - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = now
            self._refresh(ranks, used)
        mapped = max(rank.mapped_bytes for rank in ranks)
        mapped_peak = max(rank.mapped_bytes + rank.peak_bytes - rank.used_bytes for rank in ranks)
        shared = [Limit(name, used, peak, limit, len(ranks)) for name, limit in self._shared.items()]
        return shared + [Limit(name, mapped, mapped_peak, limit) for name, limit in self._own.items()]

    def _refresh(self, ranks: list[RankReading], used: int) -> None:
        snapshot = take_snapshot([self._pid])  # its control groups are found anew each time: a process may be moved into one
        self._shared = {"MemAvailable": used + snapshot.available_bytes}
        self._shared |= {level.name: used + level.headroom_bytes for level in snapshot.cgroups if level.headroom_bytes is not None}
        if self._budget_bytes is not None:
            self._shared["memory.budget"] = self._budget_bytes
        mapped = self._meter.address_space_bytes()
        self._own = {name: mapped + headroom for name, headroom in snapshot.rlimit_headroom_bytes.items()}


class DeviceReader:
    """The allocator of this rank's device. Ranks have a device each, so the fullest one speaks for all."""

    def __init__(self, probe: CudaProbe, budget_bytes: int | None) -> None:
        self._probe = probe
        self._budget_bytes = budget_bytes
        self._limits: dict[str, int] = {}
        self._refreshed_s = 0.0

    def read(self) -> RankReading:
        usage = self._probe.usage()
        self._probe.reset_peak()
        return RankReading(used_bytes=usage.used_bytes, peak_bytes=usage.peak_bytes, mapped_bytes=usage.mapped_bytes)

    def limits(self, ranks: list[RankReading]) -> list[Limit]:
        now = time.monotonic()
        if now - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = now
            self._limits = dict(self._probe.budget(self._budget_bytes).limits_bytes)
        used, peak = max(rank.used_bytes for rank in ranks), max(rank.peak_bytes for rank in ranks)
        return [Limit(name, used, peak, limit) for name, limit in self._limits.items()]
