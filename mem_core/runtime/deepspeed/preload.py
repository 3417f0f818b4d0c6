"""What DeepSpeed imports lazily at the first engine, brought forward into the fork server."""

from collections.abc import Callable
from typing import Any

import torch


def _as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return function if function is not None else _as_it_is


def import_lazy_parts() -> None:
    """Import DeepSpeed's optimizer modules.

    Its Muon module decorates functions with torch.compile at import, which pulls in all of inductor: 3.7 s and over 100 MB in
    every worker, for an optimizer that MEM does not offer. The decorator is left out for that one import.
    """
    compile_function = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
        import deepspeed.runtime.zero.parameter_offload
        import deepspeed.runtime.zero.stage3
        import deepspeed.runtime.zero.stage_1_and_2  # noqa: F401
    finally:
        torch.compile = compile_function
    _probe_ops()


def _probe_ops() -> None:
    """DeepSpeed probes each op with a compiler at the first process group: 0.25 s, the same answer for every worker."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator is not None and accelerator.device_name() == "cpu":  # elsewhere probing could initialise the device before the fork
        _ = deepspeed.ops.__compatible_ops__
