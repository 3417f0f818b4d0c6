"""A checkpoint as a universal one: `python -m mem_core.runtime.deepspeed.programs.reshard CHECKPOINT_FOLDER OUTPUT_FOLDER ZERO_STAGE`.

Runs in a process of its own, since it imports DeepSpeed, whose converter unpickles without an allow-list; so nothing is read
before the integrity validator has proven every file. Standard input is the manifest key, empty where there is none. OUTPUT then
holds `zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt` and model states; an engine at ZERO_STAGE with `load_universal` takes it.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from mem_core.domain.errors import InternalError, MemError
from mem_core.runtime.deepspeed.engine_config import UNIVERSAL_PART, is_universal
from mem_core.runtime.deepspeed.programs.export import proven_manifest

MODEL_STATES = "mp_rank_00_model_states.pt"
MODEL_STATES_STAGE3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_MOMENTS = ("fp32", "exp_avg", "exp_avg_sq")


def to_universal(folder: Path, output: Path, zero_stage: int, key: bytes | None = None) -> None:
    """Convert a ZeRO checkpoint of stage 1, 2 or 3 to what an engine at `zero_stage` (1, 2 or 3) loads.

    Raises:
        NoValidCheckpoint: it is bad. InternalError: the converter made nothing.
    """
    manifest = proven_manifest(folder, key)
    from deepspeed.checkpoint.ds_to_universal import main as convert

    output.parent.mkdir(parents=True, exist_ok=True)
    arguments = argparse.Namespace(
        input_folder=str(folder), output_folder=str(output), num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False,
        strict=True, inject_missing_state=True,
    )  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        convert(arguments)
    if not is_universal(output):
        raise InternalError(f"the converter made nothing in {output}", remedy="Report this as a bug.")
    if manifest.zero_stage == 3 and zero_stage < 3:
        _from_stage3(output)
    elif manifest.zero_stage < 3 and zero_stage == 3:
        _to_stage3(output)


# DeepSpeed's universal form is two forms: stage 3 and stages 1 and 2 name, wrap and place the same numbers differently (0.19.8).


def _to_stage3(output: Path) -> None:
    """What stage 3's loader misses in a conversion from stages 1 and 2: its name of the model states, the step inside the state."""
    os.link(output / MODEL_STATES, output / MODEL_STATES_STAGE3)
    path = output / UNIVERSAL_PART / "optimizer_state.pt"
    state = _read(path)
    step = _read(next((output / UNIVERSAL_PART).glob("*/step.pt")))
    _write(path, state | {"optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": state["param_groups"]}})


def _from_stage3(output: Path) -> None:
    """What the loader of stages 1 and 2 misses in a conversion from stage 3: names, shapes, the wrapping, step and version."""
    import deepspeed

    os.link(output / MODEL_STATES_STAGE3, output / MODEL_STATES)
    path = output / UNIVERSAL_PART / "optimizer_state.pt"
    state = _read(path)
    step = state["optimizer_state_dict"]["state"][0]["step"]
    heavy = ("optimizer_state_dict", "fp32_flat_groups")  # rank 0's shards, which nobody reads
    _write(path, {name: value for name, value in state.items() if name not in heavy} | {"ds_version": deepspeed.__version__})
    for group in _read(output / MODEL_STATES)["param_shapes"]:
        for name, shape in group.items():
            folder = output / UNIVERSAL_PART / name
            for moment in _MOMENTS:
                _write(folder / f"{moment}.pt", {"param": _read(folder / f"{moment}.pt").reshape(tuple(shape)), "cat_dim": 0})
            _write(folder / "step.pt", step)


def _read(path: Path) -> Any:
    import torch

    from mem_core.runtime.deepspeed.engine import SAFE_CLASSES

    with torch.serialization.safe_globals(SAFE_CLASSES):
        return torch.load(path, map_location="cpu", weights_only=True)


def _write(path: Path, value: Any) -> None:
    import torch

    torch.save(value, path)


def main(argv: list[str]) -> int:
    """Convert one checkpoint."""
    try:
        to_universal(Path(argv[0]), Path(argv[1]), int(argv[2]), sys.stdin.buffer.read() or None)
    except MemError as exc:
        sys.stderr.write(f"{exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
