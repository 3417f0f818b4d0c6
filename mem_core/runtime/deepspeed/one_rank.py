"""What DeepSpeed does for many ranks and need not for one: sums of one number, and buffers for gradients that go nowhere.

Each of these changes no number, only time and memory. They use private names of DeepSpeed and look for them first: without them it goes
on doing what it always does.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_PLAIN = {"cpu_offload": False, "overlap_comm": False, "zenflow": False, "partition_gradients": False, "has_moe_layers": False}


def leave_out_sums_of_one() -> None:
    """Gradients and norms are added up over the ranks where there is only one, too: a copy of every gradient through the collectives,
    which leaves each number as it was. For a small step that is a share which plain trainers do not pay."""
    backend: Any = getattr(sys.modules["deepspeed.comm.comm"], "cdb", None)
    if hasattr(backend, "all_reduce"):
        backend.all_reduce = partial(_sum_of_one, backend.all_reduce)


def _sum_of_one(
    every: Callable[..., Any], tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Any:  # whoever waits for the answer's handle gets it from the collective
    return every(tensor, op, group, async_op) if async_op else None


def leave_gradients_in_place(optimizer: Any) -> bool:
    """For ZeRO stage 1 in float32 on one rank: before an update gradients are copied into a buffer for the other ranks, divided by the
    number of ranks, and copied into one for this rank's own part, which is all of them. Without the buffers they stay where the backward
    pass left them, the same bits in less memory: at 25 million parameters an update takes a third of the time. Returns whether it is so.
    """
    same_dtype = getattr(optimizer, "communication_data_type", None) == torch.float32
    unscaled = getattr(optimizer, "gradient_predivide_factor", None) == 1.0
    plain = all(getattr(optimizer, name, None) == value for name, value in _PLAIN.items())
    if not (
        plain and same_dtype and unscaled and hasattr(optimizer, "contiguous_gradients") and hasattr(optimizer, "buffered_reduce_fallback")
    ):
        return False
    optimizer.contiguous_gradients = False
    optimizer.buffered_reduce_fallback = _nobody_to_reduce_with
    return True


def _nobody_to_reduce_with(*_: Any, **__: Any) -> None:
    """The mean over one rank is what the rank has."""
