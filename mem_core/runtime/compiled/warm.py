"""What the fork server runs before it forks ranks: the model is built once, and every canonical pass is compiled.

It runs in a thread that has ended when the first rank is forked. OpenMP keeps its team of threads with the thread that opened it:
had the forking thread computed anything, its children would inherit a team that is not there, and wait for it for ever.
"""

import functools
import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from mem_core.domain.plan import MemoryPlan
from mem_core.runtime.compiled.canonical import CanonicalPass, canonical_passes
from mem_core.runtime.compiled.loss import compiled_loss, gradients, same_bits
from mem_core.runtime.compiled.order import DONE, Compiling, key_of, most_rows
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.deepspeed.trainable import trainable_of
from mem_core.runtime.models.build import build_model, switch_back_and_forth
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

_SHOWN_CHARS = 600


@dataclass(slots=True)
class Standing:
    """What this process, and whatever is forked from it, has compiled: keys, and for each what went wrong, empty where nothing did.

    Versions of a compiled function belong to a process as a whole, so what is known of them does too.
    """

    problems: dict[str, str] = field(default_factory=dict[str, str])


@functools.cache
def standing() -> Standing:
    """Of this process."""
    return Standing()


def passes_of(spec: WorkerSpec) -> tuple[CanonicalPass, ...]:
    """What a rank of this run can meet."""
    with TokenDataset.open(spec.data_folder) as data:
        return canonical_passes(most_rows(spec), spec.request.data.sequence_length, apart=data.index.documents_apart)


def warm_main(connection: Connection) -> None:
    """Entry, in the fork server itself: takes a `WorkerSpec`, tells each `Compiling`, and at the end what is wrong; "" where nothing is."""
    spec: WorkerSpec = connection.recv()
    known = standing().problems
    key = key_of(spec)
    if key not in known:
        try:
            compile_all(spec, lambda told: _tell(connection, told))
            known[key] = DONE
        except Exception as exc:  # noqa: BLE001 - whatever dynamo, inductor and the compiler raise means: not usable
            traceback.print_exc()
            known[key] = f"{type(exc).__name__}: {words_of(str(exc))}"
    _tell(connection, known[key])


def _tell(connection: Connection, told: Any) -> None:
    try:
        connection.send(told)
    except OSError:
        return  # nobody waits for it any more


def compile_all(spec: WorkerSpec, told: Callable[[Compiling], None]) -> None:
    """Compile every canonical pass of this run's model, forward and backward, at the threads that its ranks use."""
    before = torch.get_num_threads()
    torch.set_num_threads(spec.num_threads)  # inductor writes that number into what it makes
    try:
        with same_bits(spec):
            module = model_of(spec)
            passes = passes_of(spec)
            for number, each in enumerate(passes, 1):
                told(Compiling(number, len(passes), each.words))
                labels, inputs = each.tensors(torch.device("cpu"))
                gradients(compiled_loss()(module, labels, inputs), module)
    finally:
        torch.set_num_threads(before)
        gc.collect()


def model_of(spec: WorkerSpec) -> torch.nn.Module:
    """The model as a rank builds it, on the CPU."""
    request = spec.request
    plan: MemoryPlan = spec.default_plan
    model = build_model(request.model, request.data.sequence_length, request.training.seed, spec.dtype, plan.activation_checkpointing)
    switch_back_and_forth(model)
    return trainable_of(request).choose(model).train()


def words_of(text: str) -> str:
    """The first line and, instead of a command of many lines, what the compiler put out."""
    first, _, rest = text.strip().partition("\n")
    output = rest.partition("Output:")[2] or rest
    lines = [line.strip() for line in (first, *output.splitlines()) if line.strip()]
    return " | ".join(lines)[:_SHOWN_CHARS]
