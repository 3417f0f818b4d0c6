"""How far apart the weights of two checkpoints of one shape are, read from their files without the engine. Imports torch on first use."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mem_core.runtime.checkpoint_manager.inspection.shards import required_shards
from mem_core.runtime.checkpoint_manager.inspection.tensor_checks import (
    load_safely,
    partitioned_shapes,
    stage3_padding,
    weight_groups,
)

_CHUNK_ELEMENTS = 4 << 20


def weights_distance(redone: Path, recorded: Path, num_ranks: int, zero_stage: int) -> float | None:
    """Norm of the difference of all trained weights over that of the recorded ones, in float64; None where the two do not hold the same.

    `num_ranks`, `zero_stage`: the shape of both. The master copy where there is one. Both have been scanned or come from this process.
    """
    apart, whole = 0.0, 0.0
    for options in required_shards(num_ranks, zero_stage):
        name = next((option for option in options if (recorded / option).is_file()), None)
        if name is None or not (redone / name).is_file():
            return None
        if zero_stage and name.endswith("model_states.pt"):
            continue
        shapes = _shapes(recorded, zero_stage)
        ours, theirs = (list(_weights(folder / name, shapes, num_ranks, zero_stage)) for folder in (recorded, redone))
        if [part.shape for part in ours] != [part.shape for part in theirs]:
            return None
        for old, new in zip(ours, theirs, strict=True):
            found = _squares(old, new)
            apart, whole = apart + found[0], whole + found[1]
    return math.sqrt(apart / whole) if whole else None


def _shapes(folder: Path, zero_stage: int) -> Any:
    """What ZeRO-3 partitions: only there does a part hold numbers that are none."""
    return partitioned_shapes(load_safely(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")) if zero_stage == 3 else {}


def _weights(path: Path, shapes: Any, num_ranks: int, zero_stage: int) -> Iterator[Any]:
    """Flat tensors of weights in a file, in its own order; what pads the share of a rank is zero."""
    content = load_safely(path)
    if zero_stage == 0:
        yield from (content["module"][name].reshape(-1) for name in sorted(content["module"]))
        return
    groups = weight_groups(content["optimizer_state_dict"])
    padding = stage3_padding(path.name, groups, shapes, num_ranks) if zero_stage == 3 else {}
    for index, group in enumerate(groups):
        flat = group.detach().reshape(-1)
        if padding.get(index):
            flat = flat.clone()
            for first, end in padding[index]:
                flat[first:end] = 0
        yield flat


def _squares(old: Any, new: Any) -> tuple[float, float]:
    """(sum of squared differences, sum of squares of `old`)."""
    apart, whole = 0.0, 0.0
    for first in range(0, int(old.numel()), _CHUNK_ELEMENTS):
        part = old[first : first + _CHUNK_ELEMENTS].double()
        apart += float((new[first : first + _CHUNK_ELEMENTS].double() - part).square().sum())
        whole += float(part.square().sum())
    return apart, whole
