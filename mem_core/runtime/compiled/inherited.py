"""What a rank does with the compiled loss that it was born with: prove that it is there, and let the model use it."""

from typing import Any

import torch

from mem_core.domain.errors import EnvironmentUnfit
from mem_core.runtime.compiled.loss import TARGETS, add_in_one_order, compiled_loss, gradients
from mem_core.runtime.compiled.order import key_of
from mem_core.runtime.compiled.warm import passes_of, standing
from mem_core.runtime.ranks.worker.classify import memory_kind
from mem_core.runtime.ranks.worker.protocol import WorkerSpec


def take_over(module: torch.nn.Module) -> None:
    """From now on `module(targets=labels, **inputs)` is the compiled summed loss; without labels the model is as it was.

    Only the forward of the module itself is replaced, so that hooks on its call stay outside of what is compiled.
    """
    plain = module.forward
    loss = compiled_loss()

    def forward(*args: Any, **inputs: Any) -> Any:
        labels = inputs.pop(TARGETS, None)
        return plain(*args, **inputs) if labels is None else loss(module, labels, inputs)

    module.forward = forward


def make_ready(module: torch.nn.Module, spec: WorkerSpec) -> None:
    """Take every canonical pass once; afterwards a pass that no version fits goes on uncompiled.

    Which passes that are follows from their sizes alone, as the versions do. On a CPU, where this process was born with what it needs,
    compiling anew is an error: it costs some milliseconds. A device must not be touched before the fork, so there the rank compiles
    for itself, from what the disk has kept. Leaves no gradient.

    Raises:
        EnvironmentUnfit: this process was born without the compiled code of this run, or its engine does not fit it.
    """
    add_in_one_order(spec)
    if spec.device == "cpu":
        _prove_inherited(module, spec)
    else:
        _take_every_pass(module, spec)
    torch.compiler.set_stance("eager_on_recompile")


def _prove_inherited(module: torch.nn.Module, spec: WorkerSpec) -> None:
    problem = standing().problems.get(key_of(spec), "it was forked before anything was compiled")
    if problem:
        raise _not_at_hand(problem)
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            _take_every_pass(module, spec)
    except RuntimeError as exc:
        if memory_kind(exc) is not None:
            raise
        raise _not_at_hand(str(exc)) from exc


def _take_every_pass(module: torch.nn.Module, spec: WorkerSpec) -> None:
    loss, device = compiled_loss(), next(module.parameters()).device
    for each in passes_of(spec):
        labels, inputs = each.tensors(device)
        gradients(loss(module, labels, inputs), module)


def _not_at_hand(problem: str) -> EnvironmentUnfit:
    return EnvironmentUnfit(
        f"the compiled model is not at hand in this process: {problem}",
        field="model.compile",
        value="compiled at the run's birth",
        remedy="The next start compiles it again; if this comes again, use model.compile: off in a new run.",
    )
