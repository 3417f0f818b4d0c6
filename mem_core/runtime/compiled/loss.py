"""The function that is compiled: a model's forward pass and its loss in one graph."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mem_core.runtime.deepspeed.objective import summed_cross_entropy
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

TARGETS = "targets"
"""Keyword under which a model that was taken over is handed labels, and then returns its summed loss."""
MOST_VERSIONS = 64  # of one function; torch's own limit of 8 is for versions that nobody planned

CompiledLoss = Callable[[torch.nn.Module, torch.Tensor, dict[str, Any]], torch.Tensor]


@dataclass(slots=True)
class Uncompiled:
    """How many passes of this process no compiled version fitted."""

    passes: int = 0


@functools.cache
def uncompiled() -> Uncompiled:
    """Of this process, as the versions are."""
    return Uncompiled()


def token_loss(module: torch.nn.Module, labels: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """Summed cross-entropy of `labels` [rows, tokens] under the model's logits for `inputs`.

    The class's own forward is called: the instance's may have been replaced by one that leads here. What is compiled never runs the line
    that counts; where torch falls back to this function as it stands, it says nothing, so that it has to be noticed here.
    """
    if not torch.compiler.is_compiling():
        uncompiled().passes += 1
    return summed_cross_entropy(type(module).forward(module, **inputs).logits, labels)


@functools.cache
def compiled_loss() -> CompiledLoss:
    """`token_loss`, compiled: one object in a process, as the versions that torch keeps for it are.

    `dynamic`: sizes stay open. `fullgraph`: what cannot be compiled as a whole is an error and never a patchwork whose seams depend on
    what was seen.
    """
    import torch._dynamo
    import torch._inductor.config as inductor

    torch._dynamo.config.recompile_limit = MOST_VERSIONS  # pyright: ignore[reportAttributeAccessIssue]
    inductor.compile_threads = 1  # a pool of processes would be forked from, and outlive, whoever compiles
    return torch.compile(token_loss, dynamic=True, fullgraph=True)


@contextmanager
def same_bits(spec: WorkerSpec) -> Iterator[None]:
    """Within it, what is compiled adds gradients up in one order; see `add_in_one_order`."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    filled = filling.fill_uninitialized_memory
    add_in_one_order(spec)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filling.fill_uninitialized_memory = filled


def add_in_one_order(spec: WorkerSpec) -> None:
    """For the rest of this process. Compiled code of an embedding's gradient otherwise adds with atomics from all threads at once:
    with two of them, 23 different gradients were counted in 30 equal passes. One thread of a CPU has one order by itself.

    Whatever has no such form goes on as it is, with a warning; memory that nothing was written to yet is not filled.
    """
    if spec.device == "cpu" and spec.num_threads == 1:
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling: Any = torch.utils.deterministic
    filling.fill_uninitialized_memory = False


def gradients(loss: torch.Tensor, module: torch.nn.Module) -> None:
    """A backward pass that leaves no trace: neither `.grad` nor the hooks that hang on accumulation are touched."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    torch.autograd.grad(loss, trained, allow_unused=True)
