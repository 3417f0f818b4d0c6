"""What DeepSpeed does for other ranks where there is only one: left out, with the same bits.

Each part reaches for names of DeepSpeed that are private; where one of them is not as it was when this was written, that part is not
left out. A test holds every part against DeepSpeed's own, so that a version that changes them is noticed.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

# What a ZeRO optimizer has to be for its gradients to need no buffers and its norm no other ranks.
_PLAIN = dict.fromkeys(
    ("cpu_offload", "overlap_comm", "zenflow", "partition_gradients", "has_moe_layers", "use_grad_accum_attribute"), False
) | {
    "contiguous_gradients": True, "gradient_predivide_factor": 1.0, "communication_data_type": torch.float32, "model_parallel_rank": 0,
}  # fmt: skip
_REPLACED = (
    "buffered_reduce_fallback", "reduce_independent_p_g_buckets_and_remove_grads", "get_grad_norm_direct", "_update_model_bit16_weights",
    "bit16_groups", "bit16_groups_flat", "_grad_acc_hooks", "process_gradients", "setup_buckets",
)  # fmt: skip


def leave_out_sums_of_one() -> None:
    """Gradients and norms go through the collectives where there is only one rank, too, which leaves each number as it was."""
    backend: Any = getattr(sys.modules["deepspeed.comm.comm"], "cdb", None)
    if hasattr(backend, "all_reduce"):
        backend.all_reduce = partial(_sum_of_one, backend.all_reduce)


def leave_out_what_ranks_need(optimizer: Any) -> None:
    """Of stage 1 in float32: a hook on every weight, the buffers that gradients are copied into (one for other ranks, one for the rank's
    own part) and the lists of what goes there, a copy in double precision for each norm, and new views of weights that have never moved."""
    as_expected = all(getattr(optimizer, name, None) == value for name, value in _PLAIN.items())
    if not as_expected or not all(hasattr(optimizer, name) for name in _REPLACED):
        return
    optimizer.contiguous_gradients = False
    # A hook on every weight would note each gradient down as ready to be sent; whatever ends a pass is called by the engine itself.
    optimizer.setup_buckets()
    for handle in optimizer._grad_acc_hooks:
        handle.remove()
    optimizer._grad_acc_hooks.clear()
    # The mean over one rank is what it has: no gradient is noted down for it.
    optimizer.reduce_independent_p_g_buckets_and_remove_grads = optimizer.buffered_reduce_fallback = _nothing
    optimizer.get_grad_norm_direct = partial(norm_of_all, optimizer.get_grad_norm_direct)
    optimizer._update_model_bit16_weights = partial(_views_that_moved, optimizer, optimizer._update_model_bit16_weights)


def _sum_of_one(every: Callable[..., Any], tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    return every(tensor, op, group, async_op) if async_op else None  # whoever waits for a handle gets one


def _nothing(*_: Any, **__: Any) -> None: ...


def norm_of_all(own: Callable[..., torch.Tensor], gradients: Iterable[torch.Tensor], params: Any, norm_type: float = 2) -> torch.Tensor:
    """The norm of a list of gradients as DeepSpeed's `own` takes it, to the bit: each tensor's in double precision, read once; -1 where
    it is not finite. Other norms than the Euclidean one, and padding among the gradients, are left to `own`."""
    tensors = list(gradients)
    if norm_type != 2 or not tensors or any(getattr(tensor, "_zero_padding", False) for tensor in tensors):
        return own(tensors, params, norm_type)
    norms = torch.stack(torch._foreach_norm(tensors, 2.0, dtype=torch.float64))  # pyright: ignore[reportPrivateImportUsage]
    total = norms.pow(2.0).sum().float().pow(0.5)
    return torch.where(torch.isfinite(total), total, -1.0)


def _views_that_moved(optimizer: Any, own: Callable[[int], None], group_index: int) -> None:
    """After each step DeepSpeed makes every weight a view of the flat group anew: needless where each of them lies in it."""
    flat = optimizer.bit16_groups_flat[group_index]
    begin, end = flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()
    if not all(begin <= param.data_ptr() < end for param in optimizer.bit16_groups[group_index]):
        own(group_index)
