"""What the driver's side asks of the fork server, and is told. Imports no torch, since the driver does not."""

from dataclasses import dataclass
from typing import Any

from mem_core.runtime.ranks.worker.protocol import WorkerSpec

COMPILE = "mem_core.runtime.compiled.warm:warm_main"
DONE = ""


@dataclass(frozen=True, slots=True)
class Compiling:
    """Which of how many passes is being compiled."""

    number: int
    of: int
    words: str


def most_rows(spec: WorkerSpec) -> int:
    """Rows of one rank in a global batch."""
    return spec.request.training.global_batch_size // spec.num_ranks


def key_of(spec: WorkerSpec) -> str:
    """What decides the compiled code, in one text: equal texts share it."""
    request = spec.request
    parts: dict[str, Any] = {
        "model": request.model.model_dump(mode="json"), "dtype": spec.dtype, "threads": spec.num_threads, "rows": most_rows(spec) > 1,
        "length": request.data.sequence_length, "data": spec.data_folder, "recompute": spec.default_plan.activation_checkpointing,
    }  # fmt: skip
    return repr(sorted(parts.items()))
