"""A checkpoint as a Hugging Face folder:
`python -m mem_core.runtime.deepspeed.programs.export CHECKPOINT_FOLDER RUN_FOLDER OUTPUT [merge]`.

Runs in a process of its own, since it imports DeepSpeed. ZeRO shards are merged by DeepSpeed's own converter, which unpickles
without an allow-list; so nothing is read before the integrity validator has proven every file, and what comes out must have
the weights digest that was recorded when the checkpoint was saved. What did not train is read anew from the model's own folder and
held against the fingerprint in the checkpoint. Standard input is the manifest key, empty where there is none.

A run that trained adapters gives the folder that `peft.PeftModel.from_pretrained` loads; with `merge`, and for every other run, the
folder holds the whole model.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from mem_core.core.run.record import RunRecord, record_of
from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.domain.errors import MemError, NoValidCheckpoint
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.inspection.file_checks import read_manifest
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged
from mem_core.runtime.checkpoint_manager.inspection.shards import required_shards
from mem_core.runtime.checkpoint_manager.inspection.tensor_checks import load_safely
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
from mem_core.runtime.deepspeed.trainable import BASE_KEY, Trainable, refuse_other_base, trainable_of, weights_digest
from mem_core.runtime.models.adapters import export_adapters
from mem_core.runtime.models.build import build_model, clean_name, save_pretrained_folder


def proven_manifest(folder: Path, key: bytes | None = None) -> CheckpointManifest:
    """The manifest of a checkpoint whose every file was read and judged just now, with a key its signature too.

    Raises:
        NoValidCheckpoint: with the reasons.
    """
    try:
        manifest = read_manifest(OsDisk(), folder, key).manifest
    except (ManifestDamaged, FileNotFoundError) as exc:
        raise NoValidCheckpoint(f"{folder.name} is not valid: {exc}", remedy="Take another step.") from exc
    verdict = IntegrityValidator(signature_key=key)(folder, manifest, "", "integrity")
    if not verdict.valid:
        raise NoValidCheckpoint(
            f"the checkpoint of step {manifest.step} is not valid: {'; '.join(verdict.reasons)}", remedy="Take another step."
        )
    return manifest


def merged_state(folder: Path, manifest: CheckpointManifest) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint by clean name, tied ones under each of their names. `folder` must be proven."""
    if manifest.zero_stage == 0:
        with torch.serialization.safe_globals([]):
            named: dict[str, Any] = torch.load(folder / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=True)["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        named = dict(get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name) or {})
    return {clean_name(name): tensor for name, tensor in named.items()}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 copy with storage of its own: merged tensors are views of one flat buffer, which safetensors refuses."""
    return tensor.detach().to(torch.float32, copy=True)


def _once(named: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """Tied weights share storage; the first name in order stands for all, as when the digest was taken."""
    found: dict[int, str] = {}
    for name in named:
        found.setdefault(named[name].data_ptr(), name)
    return tuple(found.values())


def base_of(folder: Path, manifest: CheckpointManifest, record: RunRecord, trainable: Trainable) -> torch.nn.Module:
    """The model as the run built it, what does not train proven to be what the checkpoint was trained on. `folder` must be proven.

    Raises:
        RequestError: the model folder is gone or has changed.
    """
    request = record.request
    module = build_model(request.model, request.data.sequence_length, request.training.seed, record.dtype, activation_checkpointing=False)
    trainable.choose(module)
    names = next(iter(required_shards(manifest.num_ranks, manifest.zero_stage)))
    saved = next(load_safely(folder / name) for name in names if (folder / name).exists()).get(BASE_KEY, "")
    refuse_other_base(saved, trainable.base_digest(module), request.model.source)
    return module


def export(folder: Path, record: RunRecord, output: Path, key: bytes | None = None, *, merge: bool = False) -> str:
    """Write the Hugging Face folder; returns the weights digest, which equals the manifest's.

    Raises:
        NoValidCheckpoint: the checkpoint is bad, or the merged weights are not those that were saved. RequestError: the model folder
        that the run began with is gone or has changed.
    """
    manifest = proven_manifest(folder, key)
    merged = merged_state(folder, manifest)
    trained = tuple(manifest.parameters) or _once(merged)
    digest = weights_digest((name, merged[name]) for name in trained)
    if manifest.weights_digest and digest != manifest.weights_digest:
        raise NoValidCheckpoint(
            f"the merged weights of step {manifest.step} are not those that were saved",
            value=digest[:16], bound=manifest.weights_digest[:16], remedy="Report this as a bug.",
        )  # fmt: skip
    state, model = {name: _own(merged[name]) for name in trained}, record.request.model
    trainable = trainable_of(record.request)
    base = base_of(folder, manifest, record, trainable) if trainable.has_base else None
    if model.lora is not None and not merge:
        export_adapters(model, state, base, output)
    else:
        save_pretrained_folder(model, state if base is None else trainable.whole(base.float(), state), output)
    return digest


def main(argv: list[str]) -> int:
    """Export one checkpoint; the last line of standard output is the digest."""
    try:
        record, key = record_of(Path(argv[1])), sys.stdin.buffer.read() or None
        digest = export(Path(argv[0]), record, Path(argv[2]), key, merge=argv[3:] == ["merge"])
    except MemError as exc:
        sys.stderr.write(f"{exc}\n")
        return exc.exit_code
    sys.stdout.write(f"{digest}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
