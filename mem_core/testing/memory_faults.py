"""Out-of-memory on demand inside a rank: callables for `WorkerSpec.on_built`, made with `functools.partial`, so that they pickle."""

import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ALLOCATOR_WORDS = "[enforce fail at alloc_cpu.cpp:129] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."


@dataclass
class PlannedOom:
    """Fails the pass number `micro_batch` of batch `batch_index` on `rank`, `times` times in a row, once per file `marker`.

    In "backward" a hook on the first parameter fails, so that a part of the gradients is there already. `marker` is a file
    that outlives the process, so that a restarted group does not meet the fault again.
    """

    phase: Literal["forward", "backward", "step"]
    batch_index: int
    micro_batch: int
    times: int
    marker: Path
    rank: int = 0


def fail_allocation(runner: Any, plan: PlannedOom) -> None:
    """Wrap the engine's verbs so that they fail as planned."""
    if runner.spec.rank != plan.rank:
        return
    state = {"batch": -1, "pass": 0}
    engine = runner.engine
    forward, backward, step = engine.forward, engine.backward, engine.step

    def due(phase: str) -> bool:
        at = runner.position.batch_index == plan.batch_index
        done = plan.marker.stat().st_size if plan.marker.exists() else 0
        if not at or phase != plan.phase or done >= plan.times or (phase != "step" and state["pass"] - 1 != plan.micro_batch and not done):
            return False
        with plan.marker.open("ab") as file:
            file.write(b".")
        return True

    def failing_forward(**inputs: Any) -> Any:
        if state["batch"] != runner.position.batch_index:
            state.update(batch=runner.position.batch_index)
            state["pass"] = 0
        state["pass"] += 1
        if due("forward"):
            raise RuntimeError(ALLOCATOR_WORDS)
        return forward(**inputs)

    def failing_backward(loss: Any) -> None:
        if not due("backward"):
            backward(loss)
            return
        parameter = next(iter(p for p in engine.raw.module.parameters() if p.requires_grad))

        def fail(_: Any) -> None:
            raise RuntimeError(ALLOCATOR_WORDS)

        hook = parameter.register_hook(fail)
        try:
            backward(loss)
        finally:
            hook.remove()

    def failing_step() -> bool:
        if due("step"):
            raise RuntimeError(ALLOCATOR_WORDS)
        return step()

    engine.forward, engine.backward, engine.step = failing_forward, failing_backward, failing_step


def limit_address_space(runner: Any, headroom_bytes: int) -> None:
    """RLIMIT_AS at what the rank maps now plus some headroom: from here on allocations beyond it fail."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + headroom_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def join_cgroup(runner: Any, folder: Path) -> None:
    """Move the rank into a control group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def kill_rank(runner: Any, batch_index: int, marker: Path) -> None:
    """SIGKILL from inside at the forward of one batch, once."""
    forward = runner.engine.forward

    def dying_forward(**inputs: Any) -> Any:
        if runner.position.batch_index == batch_index and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(**inputs)

    runner.engine.forward = dying_forward
