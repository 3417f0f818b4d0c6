"""Out-of-memory on demand inside a rank: callables for `WorkerSpec.on_built`, made with `functools.partial`, so that they pickle."""

import errno
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mem_core.core.memory.start import Limit
from mem_core.runtime.ranks.agreement import RankReading
from mem_core.testing.ports import wait_for_save

ALLOCATOR_WORDS = "[enforce fail at alloc_cpu.cpp:129] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."


IN_PIECES = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.34 GiB is free. Including "
    "non-PyTorch memory, this process has 22.30 GiB memory in use. Of the allocated memory 12.30 GiB is allocated by PyTorch, and "
    "10.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF"
)


@dataclass(frozen=True)
class PlannedOom:
    """Fails one pass of batch `batch_index` on `rank`, `times` tries of the batch in a row.

    In "backward" a hook on the first parameter fails, so that a part of the gradients is there already; in "step" nothing of the
    update has been applied yet.
    """

    phase: Literal["forward", "backward", "step"]
    batch_index: int
    where: Literal["first", "middle", "last"] = "first"
    times: int = 1
    rank: int = 0


class OomInjector:
    """Wraps the verbs of one rank's engine. Each firing adds a byte, the number of passes, to `<folder>/<number of the plan>`."""

    def __init__(self, runner: Any, plans: tuple[PlannedOom, ...], folder: Path) -> None:
        self._runner, self._plans, self._folder = runner, plans, folder
        self._pass, self._num_passes = 0, 0
        self._engine = runner.engine
        self._forward, self._backward, self._step = self._engine.forward, self._engine.backward, self._engine.step
        self._accumulate = runner._passes.accumulate
        self._engine.forward, self._engine.backward, self._engine.step = self.forward, self.backward, self.step
        runner._passes.accumulate = self.accumulate

    def accumulate(self, micro_batches: tuple[Any, ...], *arguments: Any) -> float:
        self._pass, self._num_passes = -1, len(micro_batches)
        return self._accumulate(micro_batches, *arguments)

    def forward(self, **inputs: Any) -> Any:
        self._pass += 1
        if self._due("forward"):
            raise RuntimeError(ALLOCATOR_WORDS)
        return self._forward(**inputs)

    def backward(self, loss: Any) -> None:
        if not self._due("backward"):
            self._backward(loss)
            return

        def fail(_: Any) -> None:
            raise RuntimeError(ALLOCATOR_WORDS)

        hook = next(p for p in self._engine.raw.module.parameters() if p.requires_grad).register_hook(fail)
        try:
            self._backward(loss)
        finally:
            hook.remove()

    def step(self) -> bool:
        if self._due("step"):
            raise RuntimeError(ALLOCATOR_WORDS)
        return self._step()

    def _due(self, phase: str) -> bool:
        for number, plan in enumerate(self._plans):
            index = {"first": 0, "middle": self._num_passes // 2, "last": self._num_passes - 1}[plan.where]
            here = plan.phase == phase and plan.batch_index == self._runner.position.batch_index and plan.rank == self._runner.place.rank
            if here and (phase == "step" or index == self._pass) and fired(self._folder, number) < plan.times:
                with (self._folder / str(number)).open("ab") as file:
                    file.write(bytes((min(255, self._num_passes),)))
                return True
        return False


def fired(folder: Path, number: int | str) -> int:
    """How often the plan of this number, or the port that writes to a file of this name, has fired."""
    path = folder / str(number)
    return path.stat().st_size if path.exists() else 0


def fail_allocations(runner: Any, plans: tuple[PlannedOom, ...], folder: Path) -> None:
    """Fail as planned."""
    OomInjector(runner, plans, folder)


class ScriptedReader:
    """A `MemoryReader` of a made-up machine: bytes follow from the last passes, the limit from the batch index."""

    def __init__(self, runner: Any, tight: tuple[int, int], per_token: int, fixed_bytes: int, limits: tuple[int, int]) -> None:
        self._runner, self._tight, self._per_token, self._fixed_bytes, self._limits = runner, tight, per_token, fixed_bytes, limits

    def read(self) -> RankReading:
        """Used: the fixed part; peak: with the largest pass of the last step."""
        peak = self._fixed_bytes + self._per_token * self._runner._passes.largest.tokens
        return RankReading(self._fixed_bytes, peak, peak)

    def limits(self, ranks: list[RankReading]) -> list[Limit]:
        """One limit, lower between the two batches of `tight`."""
        usual, low = self._limits
        limit = low if self._tight[0] <= self._runner.position.batch_index < self._tight[1] else usual
        return [Limit("scripted", max(r.used_bytes for r in ranks), max(r.peak_bytes for r in ranks), limit)]


def script_memory(runner: Any, tight: tuple[int, int], per_token: int, fixed_bytes: int, limits: tuple[int, int]) -> None:
    """Let the rank see a made-up machine."""
    runner.memory.reader = ScriptedReader(runner, tight, per_token, fixed_bytes, limits)


def limit_address_space(runner: Any, headroom_bytes: int) -> None:
    """RLIMIT_AS at what the rank maps now plus some headroom: from here on allocations beyond it fail."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + headroom_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def move_address_space(runner: Any, tight: tuple[int, int], headroom_bytes: int) -> None:
    """A real RLIMIT_AS that comes down to little more than what is mapped before batch `tight[0]`, and is lifted before `tight[1]`."""
    step = runner.engine.step

    def moving_step() -> bool:
        applied = step()
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        within = tight[0] <= runner.position.batch_index + 1 < tight[1]
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if within and soft == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (mapped + headroom_bytes, hard))
        elif not within and soft != resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, hard))
        return applied

    runner.engine.step = moving_step


def join_cgroup(runner: Any, folder: Path) -> None:
    """Move the rank into a control group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def limit_cgroup(runner: Any, folder: Path, headroom_bytes: int) -> None:
    """Join a group of version 1; its limit is what is charged there now and some headroom (pages from before are charged elsewhere)."""
    (folder / "memory.limit_in_bytes").write_text(str(2**40))  # that of an earlier try
    join_cgroup(runner, folder)
    time.sleep(0.2)  # the supervisor looks every 50 ms which groups its ranks are in
    used = int((folder / "memory.usage_in_bytes").read_text())
    (folder / "memory.limit_in_bytes").write_text(str(used + headroom_bytes))


def kill_rank(runner: Any, batch_index: int, marker: Path) -> None:
    """SIGKILL from inside at the forward of one batch, once."""
    forward = runner.engine.forward

    def dying_forward(**inputs: Any) -> Any:
        if runner.position.batch_index == batch_index and not marker.exists():
            marker.touch()
            wait_for_save(runner, batch_index)
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(**inputs)

    runner.engine.forward = dying_forward


def once(marker: Path) -> bool:
    """True at the first call over all processes that share the file."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def leak(runner: Any, bytes_per_step: int, headroom_bytes: int, marker: Path | None = None) -> None:
    """Under a real RLIMIT_AS, the first rank that comes here keeps some memory of every step; its successors do not, unless there is
    no marker."""
    limit_address_space(runner, headroom_bytes)
    if marker is not None and not once(marker):
        return
    step, kept = runner.engine.step, []

    def leaking_step() -> bool:
        kept.append(bytearray(bytes_per_step))
        return step()

    runner.engine.step = leaking_step


def fail_in_pieces(runner: Any, batch_index: int, times: int, folder: Path) -> None:
    """The forward of one batch fails as a device's allocator fails whose memory is in pieces. Each failure is a line in
    `<folder>/in-pieces`."""
    import torch

    forward = runner.engine.forward

    def failing_forward(**inputs: Any) -> Any:
        if runner.position.batch_index == batch_index and fired(folder, "in-pieces") < times:
            with (folder / "in-pieces").open("ab") as file:
                file.write(b".")
            raise torch.OutOfMemoryError(IN_PIECES)
        return forward(**inputs)

    runner.engine.forward = failing_forward


def leak_at_saves(runner: Any, bytes_per_save: int) -> None:
    """This rank keeps some memory of every save."""
    collect, kept = runner.engine.collect_state, []

    def leaking_collect(*arguments: Any) -> Any:
        kept.append(b"x" * bytes_per_save)  # written to, so that it is resident
        return collect(*arguments)

    runner.engine.collect_state = leaking_collect


def fail_fork(runner: Any, folder: Path) -> None:
    """This rank cannot be forked, as under strict overcommit when memory is short. Each try is a line in `<folder>/forks`."""

    def fork() -> int:
        with (folder / "forks").open("ab") as file:
            file.write(b".")
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    os.fork = fork


def fail_evaluation(runner: Any, rows_that_fit: int, folder: Path) -> None:
    """Passes of an evaluation with more rows do not fit. Each failure is a line in `<folder>/failures`."""
    forward = runner.engine.forward

    def small_forward(**inputs: Any) -> Any:
        if not runner.engine.raw.module.training and inputs["input_ids"].shape[0] > rows_that_fit:
            with (folder / "failures").open("ab") as file:
                file.write(b".")
            raise RuntimeError(ALLOCATOR_WORDS)
        return forward(**inputs)

    runner.engine.forward = small_forward


def fail_one_save(runner: Any, marker: Path) -> None:
    """The first process that writes a snapshot runs out of memory over it: the forked writer, not the rank."""
    import torch

    save = torch.save

    def failing_save(*arguments: Any, **options: Any) -> None:
        if once(marker):
            raise RuntimeError(ALLOCATOR_WORDS)
        save(*arguments, **options)

    torch.save = failing_save  # type: ignore[assignment]


class FailingLoad:
    """A port that acts where it is unpickled: in a rank before its engine is built. The first loads run out of memory."""

    def __init__(self, folder: Path, times: int, kill_at_batch: int) -> None:
        self._folder, self._times, self._kill_at_batch = folder, times, kill_at_batch

    def __call__(self, runner: Any) -> None:
        """Once the engine is built: end the rank at a batch, once, so that there is something to load."""
        kill_rank(runner, self._kill_at_batch, self._folder / "killed")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        from mem_core.runtime.deepspeed.engine import Engine

        load = Engine.load

        def failing_load(engine: Any, *arguments: Any) -> None:
            if any(once(self._folder / f"load-{number}") for number in range(self._times)):
                raise RuntimeError(ALLOCATOR_WORDS)
            load(engine, *arguments)

        Engine.load = failing_load  # type: ignore[method-assign]
