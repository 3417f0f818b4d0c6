"""What watching memory costs a step: far from every limit, near one, and the agreement of two ranks (at most 2 % of a 5 ms step).

python tests/benchmarks/memory_monitoring.py [--steps 20000]
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from measuring import parsed

from mem_core.core.memory.ladder import MicroBatch, PlanBounds
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine.memory_probe import ProcessMeter
from mem_core.runtime.memory.adaptive_memory import AdaptiveMemory
from mem_core.runtime.ranks.local.board import Board
from mem_core.runtime.ranks.local.places import local_place
from mem_core.runtime.ranks.local.shared_page import SharedPage
from mem_core.runtime.ranks.worker.device import open_device
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

STEP_S = 0.005


def adaptive(folder: Path, budget_bytes: int | None) -> AdaptiveMemory:
    """As a rank has it, under a budget."""
    request = RuntimeRequest.model_validate({"run_id": "bench", "store": "/tmp", "device": "cpu", "memory": {"budget": budget_bytes}})
    spec = WorkerSpec(
        request=request, device="cpu", dtype="float32", num_threads=1, data_folder="", validation_folder=None,
        pad_token_id=0, default_plan=MemoryPlan(micro_batch_rows=8),
    )  # fmt: skip
    place = local_place(folder, "cpu", 0, 1)
    Board.create(Path(place.board_path))
    agreement = SharedPage(place, spec.deadline_s)
    memory = AdaptiveMemory(spec, place, open_device(place), agreement, PlanBounds(most_rows=8, longest_tokens=128), lambda events: None)
    memory.begin(TrainingPosition(applied_steps=0, batch_index=0), 0, None)
    return memory


def microseconds(memory: AdaptiveMemory, steps: int) -> tuple[float, float]:
    """(median of wall time, mean of CPU time) of all that memory adds to one step without an event.

    CPU time, since a mean of wall time on a busy machine tells of its neighbours.
    """
    position = TrainingPosition(applied_steps=0, batch_index=0)
    size = MicroBatch(8, 128)
    times: list[float] = []
    began_s = time.thread_time()
    for step in range(steps):
        started_s = time.perf_counter()
        position = memory.follow(position)
        memory.plan(position)
        memory.agree(None)
        memory.observe(step, size)
        times.append(1e6 * (time.perf_counter() - started_s))
    return statistics.median(times), 1e6 * (time.thread_time() - began_s) / steps


def agreement(folder: Path, steps: int) -> float:
    """Microseconds of one agreement of two ranks that are ready at the same time (here two threads that share an interpreter)."""
    Board.create(folder / "board")

    def run(rank: int) -> Callable[[], None]:
        page = SharedPage(local_place(folder, "cpu", rank, 2), 30.0)
        return lambda: [page.agree(None, undoable=True) for _ in range(steps)] and None

    threads = [threading.Thread(target=run(rank)) for rank in range(2)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1e6 * (time.perf_counter() - started_s) / steps


def main() -> None:
    """Print microseconds and shares of a 5 ms step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    arguments = parsed(parser, steps=500)
    with ProcessMeter(os.getpid()) as meter:
        used = meter.resident_bytes()
    with tempfile.TemporaryDirectory() as folder:
        for name, budget in (("far from every limit", None), ("near a budget", int(used / 0.8))):
            median, mean = microseconds(adaptive(Path(folder), budget), arguments.steps)
            print(f"{name}: median {median:.1f} us, mean CPU {mean:.1f} us a step ({100 * mean / 1e6 / STEP_S:.2f} % of 5 ms)")
        print(f"two ranks agree: {agreement(Path(folder), arguments.steps // 10):.1f} us")


if __name__ == "__main__":
    main()
