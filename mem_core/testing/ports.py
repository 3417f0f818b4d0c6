"""What tests hand to `drive(..., options=...)`: faults inside ranks, recorded plans for a twin, and what a run left to compare."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mem_core.core.run.fold import fold_state
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.plan import MemoryPlanChange
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.progress import NoProgress
from mem_core.runtime.session.opening.stages import OpeningOptions


class Console(NoProgress):
    """Keeps the lines that people would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """Keep it."""
        self.lines.append(text)

    @property
    def text(self) -> str:
        """All of them."""
        return "\n".join(self.lines)


def with_port(port: Callable[[Any], None]) -> OpeningOptions:
    """Every rank calls `port` with its runner once it is built (`WorkerSpec.on_built`), those that replay a checkpoint as well."""
    return OpeningOptions(on_built=port)


def tell_devices(runner: Any, folder: Path) -> None:
    """For `with_port`, by `functools.partial`: write which devices a rank really uses into `<folder>/rank-N.json`.

    `parameters`: where they are; `current`: torch's current device; `held_bytes`: what this process holds on each device.
    """
    import torch

    devices = {str(parameter.device) for parameter in runner.engine.raw.module.parameters()}
    held = {f"cuda:{index}": torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())}
    facts = {"parameters": sorted(devices), "current": torch.cuda.current_device(), "held_bytes": held}
    (folder / f"rank-{runner.place.rank}.json").write_text(json.dumps(facts))


def replaying(changes: tuple[MemoryPlanChange, ...]) -> OpeningOptions:
    """Start with the recorded plans of another run."""
    return OpeningOptions(first_plan_changes=changes)


def recorded(result: RunResult) -> tuple[MemoryPlanChange, ...]:
    """The plan changes that the run's journal ends with."""
    return fold_state(read_journal(Path(result.run_folder) / "journal")).memory_plan_changes


def distance(result: RunResult, other: RunResult) -> float:
    """Norm of the difference of all weights of two runs' last checkpoints, relative to the second's. One rank, ZeRO below 3."""
    import numpy as np

    ours, theirs = _weights(result), _weights(other)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def _weights(result: RunResult) -> Any:
    import numpy as np
    import torch

    folder = Path(result.run_folder) / "checkpoints" / checkpoint_name(result.applied_steps)
    state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    return np.concatenate([tensor.float().numpy().ravel() for _, tensor in sorted(state.items())])


def wait_for_save(runner: Any, batch_index: int, limit_s: float = 20.0) -> None:
    """Until the checkpoint before a batch has its verdict, so that a fault at the batch has something to go back to: steps are quicker
    than what is written beside them. Waits no longer than `limit_s`, and not at all in the first segment."""
    request = runner.request
    step = batch_index // request.training.segment_steps * request.training.segment_steps
    words, end_s = ('"checkpoint_judged"', f'"step":{step},'), time.monotonic() + limit_s
    while step and time.monotonic() < end_s:
        lines = [
            line for path in (Path(request.store) / request.run_id / "journal").glob("*.jsonl") for line in path.read_text().split("\n")
        ]
        if any(all(word in line.replace(" ", "") for word in words) for line in lines):
            return
        time.sleep(0.01)
