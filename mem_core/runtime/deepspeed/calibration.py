"""A few measured passes before training, so that the plan rests on readings and not on a formula. Leaves no trace in the run.

On a CPU the passes run in a forked child: parameters, gradients, counters and random state of the rank are out of its reach, and
an allocation that fails there harms nobody. On a device they run in place under a saved random state with `torch.autograd.grad`,
which touches neither `.grad` nor the hooks that ZeRO hangs on accumulation; ZeRO-3 is left out there, since its forward is a
collective.
"""

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mem_core.core.memory.ladder import MicroBatch
from mem_core.core.memory.model import PeakSample, fit_line
from mem_core.infrastructure.machine.memory_probe import ProcessMeter
from mem_core.infrastructure.machine.process_ties import die_with_parent, first_to_be_killed
from mem_core.runtime.data.serving.collate import Batch
from mem_core.runtime.deepspeed.objective import Objective
from mem_core.runtime.deepspeed.trainable import Trainable
from mem_core.runtime.models.build import recompute_activations, recomputes_activations
from mem_core.runtime.ranks.worker.device import LocalDevice

LIMIT_S = 10.0
SHORTEST = 16
STOP_SHARE = 0.6  # of what is free: a pass that is predicted to take more is not tried; pages that the child copies count too


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass as training does it, of made-up rows. Leaves no gradient behind."""

    objective: Objective
    trainable: Trainable

    def run(self, module: Any, batch: Batch) -> None:
        """`torch.autograd.grad` touches neither `.grad` nor the hooks that hang on accumulation."""
        torch.autograd.grad(self.objective.loss(module, batch).total, self.trainable.parameters(module), allow_unused=True)


def sizes_to_try(longest: int, typical: int, most_rows: int) -> list[MicroBatch]:
    """Ascending in tokens: single rows up to the longest, then two and four of them. The measurement stops where room ends."""
    single = {length for length in (typical, longest // 8, longest // 4, longest // 2, longest) if length >= SHORTEST}
    sizes = [MicroBatch(1, length) for length in single or {longest}]
    sizes += [MicroBatch(rows, longest) for rows in (2, 4) if rows <= most_rows]
    return sorted(sizes, key=lambda size: size.tokens)


def measure_forked(
    module: Callable[[], Any], one_pass: Pass, sizes: list[MicroBatch], free_bytes: float, *, recompute: bool
) -> list[PeakSample]:
    """Measure in a forked child; `module()` gives the model there. What it could not do is missing from the result."""
    read_fd, write_fd = os.pipe()
    parent_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:  # no memory or no process left for it: then nothing is known
        os.close(read_fd)
        os.close(write_fd)
        return []
    if pid == 0:
        os.close(read_fd)
        _child_main(parent_pid, write_fd, partial(_measured_child, module, one_pass, sizes, free_bytes, recompute))
    os.close(write_fd)
    text = _read_until_end(read_fd, time.monotonic() + LIMIT_S)
    os.close(read_fd)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("]")]  # a killed child may leave half a line
    return [PeakSample(MicroBatch(rows, length), peak_bytes) for rows, length, peak_bytes in lines]


def measure_in_place(
    module: Any, one_pass: Pass, sizes: list[MicroBatch], free_bytes: float, device: LocalDevice, *, recompute: bool
) -> list[PeakSample]:
    """Measure on the device; an allocation that fails ends the measurement. The model is left as it was."""
    before = recomputes_activations(module)
    with torch.random.fork_rng(devices=[device.torch_device]):
        _switch(module, recompute)
        try:
            return list(_measure(module, one_pass, sizes, free_bytes, _DeviceMeter(device)))
        finally:
            _switch(module, before)
            device.release_free_memory()


def _switch(module: Any, recompute: bool) -> None:
    if recompute:
        recompute_activations(module)
    elif recomputes_activations(module):
        recompute_activations(module, wanted=False)


class _HostMeter:
    """Growth of resident memory or of address space over the start, whichever is larger."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._meter = ProcessMeter(os.getpid())
        self._mapped, self._used = self._meter.mapped_and_resident_bytes()

    def start(self) -> None:
        self._meter.reset_peak()

    def peak(self) -> int:
        mapped_peak = self._meter.peak_address_space_bytes()
        return max(self._meter.peak_resident_bytes() - self._used, mapped_peak - self._mapped, 0)


class _DeviceMeter:
    def __init__(self, device: LocalDevice) -> None:
        self.device = device.torch_device
        self._probe = device.probe()
        self._used = self._probe.usage().used_bytes

    def start(self) -> None:
        self._probe.reset_peak()

    def peak(self) -> int:
        return max(0, self._probe.usage().peak_bytes - self._used)


def _measure(module: Any, one_pass: Pass, sizes: list[MicroBatch], free_bytes: float, meter: Any) -> Iterable[PeakSample]:
    """Forward and backward of each size, while the next one is expected to stay within a part of what is free."""
    found: list[PeakSample] = []
    vocabulary = module.get_input_embeddings().weight.shape[0]
    for size in sizes:
        line = fit_line(found[-2:])
        if line is not None and line.predict(size) > STOP_SHARE * free_bytes:
            return
        batch = one_pass.objective.probe(size, vocabulary, meter.device)
        meter.start()
        try:
            one_pass.run(module, batch)
        except (RuntimeError, MemoryError):
            return
        found.append(PeakSample(size, meter.peak()))
        yield found[-1]


def _measured_child(
    module: Callable[[], Any], one_pass: Pass, sizes: list[MicroBatch], free_bytes: float, recompute: bool
) -> Iterable[PeakSample]:
    model = module()
    _switch(model, recompute)
    return _measure(model, one_pass, sizes, free_bytes, _HostMeter())


def _child_main(parent_pid: int, write_fd: int, measured: Callable[[], Iterable[PeakSample]]) -> None:
    """The forked child: one thread, no collectives, first in line for the OOM killer; leaves without the parent's exit handlers."""
    try:
        die_with_parent(parent_pid)
        first_to_be_killed()
        torch.set_num_threads(1)  # the parent's thread pool does not exist in this process
        for sample in measured():
            values = [sample.micro_batch.rows, sample.micro_batch.length, sample.peak_bytes]
            os.write(write_fd, json.dumps(values).encode() + b"\n")
    finally:
        os._exit(0)


def _read_until_end(descriptor: int, deadline_s: float) -> str:
    chunks: list[bytes] = []
    while (left_s := deadline_s - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left_s)[0]:
            break
        chunk = os.read(descriptor, 65_536)
        if not chunk:
            break
        chunks.append(chunk)
    return b"".join(chunks).decode()
