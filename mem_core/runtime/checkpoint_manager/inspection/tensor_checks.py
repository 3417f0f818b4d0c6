"""The part of integrity that looks inside: safe load, names, shapes, finite numbers. Imports torch on first use, never deepspeed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.runtime.checkpoint_manager.inspection.pickle_scan import DEFAULT_ALLOWED_GLOBALS, TORCH_GLOBALS, scan_torch_file
from mem_core.runtime.checkpoint_manager.inspection.shards import required_shards

_CHUNK_ELEMENTS = 4 << 20
_MAX_REASONS = 20


@dataclass
class TensorFindings:
    """What was found; `weights_bad` when saving the same engine again would give the same bad state."""

    reasons: list[str] = field(default_factory=list)
    weights_bad: bool = False

    def damaged(self, reason: str) -> None:
        self.reasons.append(reason)

    def not_finite(self, reason: str) -> None:
        self.reasons.append(reason)
        self.weights_bad = True


def check_tensors(folder: Path, manifest: CheckpointManifest, allowed_globals: frozenset[str] = DEFAULT_ALLOWED_GLOBALS) -> TensorFindings:
    """Scan, then load every engine file under the allow-list, one at a time, and judge its content.

    Call it only on files whose SHA-256 holds. Memory: files are mapped, so about one chunk beside the page cache.
    """
    findings = TensorFindings()
    names = {entry.path for entry in manifest.files}
    for name in sorted(names):
        findings.reasons += [f"{name}: {reason}" for reason in scan_file(folder / name, allowed_globals)]
    if findings.reasons:
        return findings  # nothing is loaded from a checkpoint of which any file is unsafe
    partition_elements = 0
    param_shapes: Mapping[str, tuple[int, ...]] = {}
    for options in required_shards(manifest.num_ranks, manifest.zero_stage):
        name = next(option for option in options if option in names)
        try:
            content = load_safely(folder / name, allowed_globals)
        except Exception as exc:  # noqa: BLE001 - whatever a hostile or broken file provokes is a reason, never a crash
            findings.damaged(f"{name}: safe load refused it ({type(exc).__name__}: {str(exc)[:200]})")
            continue
        if name.endswith("model_states.pt"):
            param_shapes = _check_model_file(name, content, manifest, findings)
        else:
            partition_elements += _check_optimizer_file(name, content, manifest, param_shapes, findings)
        del content
    total = sum(math.prod(shape) for shape in param_shapes.values())
    if manifest.zero_stage and not findings.reasons and partition_elements < total:
        findings.damaged(f"the ranks' partitions hold {partition_elements} elements, the model has {total}")
    findings.reasons = findings.reasons[:_MAX_REASONS]
    return findings


def scan_file(path: Path, allowed_globals: frozenset[str]) -> tuple[str, ...]:
    """Scan what torch or pickle would load; plain text and JSON beside it are not loaded by anything."""
    if path.suffix in (".json", ".txt", ".md", ".yaml"):
        return ()
    return scan_torch_file(path, allowed_globals)


def load_safely(path: Path, allowed_globals: frozenset[str] = DEFAULT_ALLOWED_GLOBALS) -> Any:
    """`torch.load(weights_only=True)` where each allowed class that is not torch's own becomes an inert stand-in.

    So a checkpoint is read without importing the engine, and no code of the file's choosing runs.
    """
    import torch

    inert: list[Any] = [(type(name.rsplit(".", 1)[1], (_Inert,), {}), name) for name in sorted(allowed_globals - TORCH_GLOBALS)]
    with torch.serialization.safe_globals(inert):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


class _Inert:
    """Holds what a pickled object had; does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


def _check_model_file(name: str, content: Any, manifest: CheckpointManifest, findings: TensorFindings) -> Mapping[str, tuple[int, ...]]:
    """Names, shapes, ranks and finiteness of a model file. Returns name -> shape of what the optimizer partitions, in its order."""
    if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
        findings.damaged(f"{name}: holds no module")
        return {}
    if content.get("dp_world_size") != manifest.num_ranks:
        findings.damaged(f"{name}: saved on {content.get('dp_world_size')} ranks, the manifest says {manifest.num_ranks}")
    module = {_plain(key): value for key, value in content["module"].items()}
    partitioned = partitioned_shapes(content)
    shapes = {_plain(key): shape for key, shape in partitioned.items()}
    saved = shapes if manifest.zero_stage == 3 else {key: tuple(value.shape) for key, value in module.items() if hasattr(value, "shape")}
    for parameter, shape in manifest.parameters.items():
        if parameter not in saved:
            findings.damaged(f"{name}: parameter {parameter} is missing")
        elif saved[parameter] != tuple(shape):
            findings.damaged(f"{name}: parameter {parameter} has shape {list(saved[parameter])}, the model {list(shape)}")
    if manifest.zero_stage == 0 and not _states(content.get("optimizer")):
        findings.damaged(f"{name}: weights only: it holds no optimizer state, so it is no resume point")
    _check_finite(name, "module", content["module"], findings)
    _check_finite(name, "optimizer", content.get("optimizer"), findings)
    return partitioned


def _check_optimizer_file(
    name: str, content: Any, manifest: CheckpointManifest, param_shapes: Mapping[str, tuple[int, ...]], findings: TensorFindings
) -> int:
    """One rank's partition: stage, rank count, optimizer state, finiteness. Returns how many weights it holds."""
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        findings.damaged(f"{name}: holds no optimizer state")
        return 0
    stage = next(iter(getattr(state.get("zero_stage"), "arguments", ())), state.get("zero_stage"))
    counts = state.get("partition_count")
    counts = list(counts) if isinstance(counts, (list, tuple)) else [counts]
    if stage != manifest.zero_stage or any(count != manifest.num_ranks for count in counts):
        findings.damaged(
            f"{name}: of ZeRO stage {stage} on {counts} ranks, the manifest says {manifest.zero_stage} on {manifest.num_ranks}"
        )
    groups = weight_groups(state)
    inner = state.get("optimizer_state_dict") if manifest.zero_stage == 3 else state.get("base_optimizer_state")
    if not groups or inner is None:
        findings.damaged(f"{name}: weights only: it holds no optimizer state, so it is no resume point")
        return 0
    padding = stage3_padding(name, groups, param_shapes, manifest.num_ranks) if manifest.zero_stage == 3 else {}
    for index, group in enumerate(groups):
        _check_tensor(name, f"weights of group {index}", group, padding.get(index, ()), findings)
    for path, tensor in _tensors("optimizer", inner):
        index = next((int(part) for part in path.split(".") if part.isdigit()), -1)
        same = index in padding and tensor.numel() == groups[index].numel()
        _check_tensor(name, path, tensor, padding[index] if same else (), findings)
    scale = getattr(state.get("loss_scaler"), "cur_scale", 1.0)
    if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
        findings.not_finite(f"{name}: loss scale is {scale}")
    return sum(int(group.numel()) for group in groups)


def partitioned_shapes(content: Any) -> Mapping[str, tuple[int, ...]]:
    """Name -> shape of what the optimizer partitions, in its order, from a model file's content."""
    return {key: tuple(shape) for group in content.get("param_shapes") or [] for key, shape in group.items()}


def weight_groups(state: Mapping[str, Any]) -> list[Any]:
    """One rank's part of the weights in float32, flat, a tensor for each group, from the state of a partitioned optimizer."""
    return state.get("fp32_flat_groups") or state.get("single_partition_of_fp32_groups") or []


def stage3_padding(
    name: str, groups: list[Any], param_shapes: Mapping[str, tuple[int, ...]], num_ranks: int
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Group index -> element ranges that hold no weight. Stage 3 gives each rank ceil(numel / ranks) elements of each parameter and leaves
    the end of the last share as memory came (`torch.empty`), so a NaN there means nothing."""
    rank = int(name.split("zero_pp_rank_", 1)[1].split("_", 1)[0])
    sizes = iter(math.prod(shape) for shape in param_shapes.values())
    padding: dict[int, tuple[tuple[int, int], ...]] = {}
    for index, group in enumerate(groups):
        ranges: list[tuple[int, int]] = []
        offset, length = 0, int(group.numel())
        while offset < length:
            elements = next(sizes, None)
            if elements is None:
                return {}  # another layout than this version's: judge everything
            share = -(-elements // num_ranks)
            real = min(max(elements - rank * share, 0), share)
            if real < share:
                ranges.append((offset + real, offset + share))
            offset += share
        if offset != length:
            return {}
        padding[index] = tuple(ranges)
    return padding


def _check_finite(name: str, where: str, value: Any, findings: TensorFindings) -> None:
    for path, tensor in _tensors(where, value):
        _check_tensor(name, path, tensor, (), findings)


def _check_tensor(name: str, path: str, tensor: Any, skip: tuple[tuple[int, int], ...], findings: TensorFindings) -> None:
    if len(findings.reasons) < _MAX_REASONS and not _all_finite(tensor, skip):
        findings.not_finite(f"{name}: {path} is not finite")


def _all_finite(tensor: Any, skip: tuple[tuple[int, int], ...]) -> bool:
    import torch

    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    flat = tensor.detach().reshape(-1)
    starts = (0, *(end for _, end in skip))
    ends = (*(start for start, _ in skip), int(flat.numel()))
    return all(
        bool(torch.isfinite(flat[low : min(low + _CHUNK_ELEMENTS, end)]).all())
        for start, end in zip(starts, ends, strict=True)
        for low in range(start, end, _CHUNK_ELEMENTS)
    )


def _tensors(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted path, tensor) of everything inside dictionaries, lists and tuples."""
    stack = [(path, value)]
    while stack:
        where, item = stack.pop()
        if isinstance(item, dict):
            stack.extend((f"{where}.{key}", inner) for key, inner in item.items())
        elif isinstance(item, (list, tuple)):
            stack.extend((f"{where}.{index}", inner) for index, inner in enumerate(item))
        elif hasattr(item, "is_floating_point"):
            yield where, item


def _states(optimizer: Any) -> bool:
    """Whether a stage-0 optimizer entry holds state (fp16 and bf16 wrappers nest it)."""
    return optimizer is not None and any(True for _ in _tensors("optimizer", optimizer))


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name[len("module.") :]
    return name
