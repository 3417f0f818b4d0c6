"""A checkpoint as a Hugging Face folder: `python -m mem_core.runtime.deepspeed.programs.export`, or a process beside the driver.

Runs in a process of its own, since it imports DeepSpeed. ZeRO shards are merged by DeepSpeed's own converter, which unpickles
without an allow-list; so nothing is read before the integrity validator has proven every file, and what comes out must have
the weights digest that was recorded when the checkpoint was saved. What did not train is read anew from the model's own folder and
held against the fingerprint in the checkpoint.

A run that trained adapters gives the folder that `peft.PeftModel.from_pretrained` loads; where the order says `merge`, and for every
other run, the folder holds the whole model.
"""

import sys
import traceback
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from mem_core.core.results.model_card import model_card
from mem_core.core.run.fold import fold_result
from mem_core.core.run.record import RunRecord, record_of
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.domain.errors import InternalError, MemError, NoValidCheckpoint
from mem_core.domain.results.exports import MARK_NAME, ExportMark, ExportOrder
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.inspection.file_checks import read_manifest
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged
from mem_core.runtime.checkpoint_manager.inspection.shards import required_shards
from mem_core.runtime.checkpoint_manager.inspection.tensor_checks import load_safely
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
from mem_core.runtime.deepspeed.trainable import BASE_KEY, Trainable, refuse_other_base, trainable_of, weights_digest
from mem_core.runtime.models.adapters import export_adapters
from mem_core.runtime.models.build import build_model, clean_name, save_pretrained_folder
from mem_core.runtime.models.facts import describe_model


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


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy with storage of its own: merged tensors are views of one flat buffer, which safetensors refuses."""
    return tensor.detach().to(dtype, copy=True)


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


def export(order: ExportOrder) -> ExportMark:
    """Write the model folder; the weights digest in its mark equals the manifest's.

    Raises:
        NoValidCheckpoint: the checkpoint is bad, or the merged weights are not those that were saved. RequestError: the model folder
        that the run began with is gone or has changed.
    """
    folder, record = Path(order.checkpoint), record_of(Path(order.run_folder))
    manifest = proven_manifest(folder, order.key.encode() or None)
    merged = merged_state(folder, manifest)
    trained = tuple(manifest.parameters) or _once(merged)
    digest = weights_digest((name, merged[name]) for name in trained)
    if manifest.weights_digest and digest != manifest.weights_digest:
        raise NoValidCheckpoint(
            f"the merged weights of step {manifest.step} are not those that were saved",
            value=digest[:16], bound=manifest.weights_digest[:16], remedy="Report this as a bug.",
        )  # fmt: skip
    state, given = {name: _own(merged[name], torch.float32) for name in trained}, record.request
    cache_dir = Path(order.cache_dir) if order.cache_dir else None
    trainable = trainable_of(given)
    base = base_of(folder, manifest, record, trainable) if trainable.has_base else None
    adapters_alone = given.model.lora is not None and not order.merge
    dtype = _dtype(order, given.model.source, cache_dir, adapters_alone)
    mark = ExportMark(run_id=record.run_id, step=manifest.step, dtype=dtype, weights_digest=digest)
    card = model_card(record, fold_result(read_journal(Path(order.run_folder) / "journal")), manifest.step, dtype, digest)
    finish = partial(_describe, card=card, mark=mark)
    if adapters_alone:
        export_adapters(given.model, _as(state, dtype), base, Path(order.output), cache_dir, finish)
    else:
        whole = state if base is None else trainable.whole(base.float(), state)
        save_pretrained_folder(given.model, _as(whole, dtype), Path(order.output), cache_dir, finish)
    return mark


def _dtype(order: ExportOrder, source: str, cache_dir: Path | None, adapters_alone: bool) -> str:
    """`auto`: that of the source; adapters stay as they were trained, since they are small and are added to weights of any format."""
    if order.dtype != "auto":
        return order.dtype
    return "float32" if adapters_alone else describe_model(source, cache_dir).stored_dtype


def _as(state: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in state.items()}


def _describe(staging: Path, card: str, mark: ExportMark) -> None:
    """The model card, and last of all the mark, which names every other file."""
    (staging / "README.md").write_text(card, encoding="utf-8")
    files = {str(path.relative_to(staging)): path.stat().st_size for path in sorted(staging.rglob("*")) if path.is_file()}
    (staging / MARK_NAME).write_text(mark.model_copy(update={"files": files}).model_dump_json(indent=1), encoding="utf-8")


def export_main(connection: Connection) -> None:
    """Entry of a process beside the driver: takes an `ExportOrder` as JSON, answers with the mark as JSON, or the error."""
    try:
        connection.send(export(ExportOrder.model_validate_json(connection.recv())).model_dump_json())
    except MemError as exc:
        connection.send(exc)
    except Exception as exc:  # noqa: BLE001 - the last edge of a process: the owner is told
        traceback.print_exc()
        connection.send(InternalError(f"{type(exc).__name__}: {exc}"[:500], remedy="Read logs/export.log and report it."))


def main() -> int:
    """Export one checkpoint, its `ExportOrder` as JSON on standard input; the last line of standard output is the mark as JSON."""
    try:
        sys.stdout.write(export(ExportOrder.model_validate_json(sys.stdin.buffer.read())).model_dump_json() + "\n")
    except MemError as exc:
        sys.stderr.write(f"{exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
