"""`mem export`, `mem checkpoints export | pin`: a proven checkpoint as a Hugging Face folder; a checkpoint that rotation leaves alone."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from flows.commands.checkpoints import UNCHECKED, signature_key
from mem_core.core.results.evaluations import best_step
from mem_core.core.run.identity import read_identity
from mem_core.core.run.record import record_of
from mem_core.core.run.state_manager import StateManager, read_journal
from mem_core.domain.checkpoint import SIGNATURE_NAME, CheckpointExpectation, checkpoint_name
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.request import CheckpointSection
from mem_core.domain.results.exports import EXPORT_FOLDER, ExportDtype, ExportMark, ExportOrder
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.ports import CheckpointPorts, CheckpointScope

EXPORT_DEADLINE_S = 3_600.0


@dataclass(frozen=True)
class Wanted:
    """Which checkpoint: a step, the best one, or (neither) the newest valid one; `merge`: adapters within the model."""

    step: int | None = None
    best: bool = False
    merge: bool = False


def export_checkpoint(
    folder: Path, step: int | None, output: Path | None, as_json: bool, settings: Settings | None = None, *, merge: bool = False
) -> int:
    """Write `export/step-N` (or `output`) of the newest valid checkpoint (or `step`) in float32; shards are merged and checked.

    A run that trained adapters gives its adapter folder; with `merge` the whole model with the adapters in it, `export/step-N-merged`.

    Raises:
        RequestError: no such run, nothing to merge, the model folder has changed, or the checkpoint is signed and MEM_MANIFEST_KEY is
        not set. NoValidCheckpoint: no such checkpoint, or it is bad.
    """
    settings = settings or Settings.from_environment()
    _refuse_needless_merge(folder, merge)
    chosen = _choose(Catalog(OsDisk(), folder, folder.name, signature_key(settings)), step)
    target = output or folder / EXPORT_FOLDER / (checkpoint_name(chosen) + ("-merged" if merge else ""))
    return _export(folder, chosen, target, Form("float32", merge), as_json, settings)


def export_run(
    folder: Path, wanted: Wanted, dtype: ExportDtype, output: Path | None, as_json: bool, settings: Settings | None = None
) -> int:
    """`mem export`: the newest valid checkpoint as `export`, or the best or a named one as `export/step-N`; or either as `output`.
    With `merge` in a folder `export/step-N-merged`.

    Raises:
        as `export_checkpoint`; RequestError also where the run has no best step.
    """
    settings = settings or Settings.from_environment()
    _refuse_needless_merge(folder, wanted.merge)
    step = _best_step(folder) if wanted.best else wanted.step
    chosen = _choose(Catalog(OsDisk(), folder, folder.name, signature_key(settings)), step)
    own = folder / EXPORT_FOLDER
    named = own / (checkpoint_name(chosen) + ("-merged" if wanted.merge else ""))
    target = output or (own if step is None and not wanted.merge else named)
    return _export(folder, chosen, target, Form(dtype, wanted.merge), as_json, settings)


@dataclass(frozen=True)
class Form:
    """In which number format, and whether adapters are put into the model."""

    dtype: ExportDtype
    merge: bool


def _refuse_needless_merge(folder: Path, merge: bool) -> None:
    if record_of(folder).request.model.lora is None and merge:
        raise RequestError(
            "the run trained no adapters, so there is nothing to merge",
            field="--merge",
            remedy="Leave it out: the export is the whole model.",
        )


def _best_step(folder: Path) -> int:
    return best_step(read_journal(folder / "journal"), "--best", "--step")


def _export(folder: Path, step: int, output: Path, form: Form, as_json: bool, settings: Settings) -> int:
    target = output.absolute()
    mark = export_step(folder, step, target, form, settings)
    print(f"step {step:,} exported to {target} ({mark.dtype})", file=sys.stderr)
    if as_json:
        print(json.dumps({"step": step, "folder": str(target), "weights_digest": mark.weights_digest, "dtype": mark.dtype}))
    return 0


def wanted_step(folder: Path, wanted: Wanted, settings: Settings) -> tuple[int, str]:
    """The step of a valid checkpoint, and the digest of its weights. Raises RequestError, NoValidCheckpoint: there is none such."""
    catalog = Catalog(OsDisk(), folder, folder.name, signature_key(settings))
    step = _choose(catalog, _best_step(folder) if wanted.best else wanted.step)
    return step, catalog.read(step).manifest.weights_digest


def export_step(folder: Path, step: int, output: Path, form: Form, settings: Settings) -> ExportMark:
    """Write the model folder of a step. Says nothing; raises as `export_checkpoint`."""
    key = signature_key(settings)
    source, target = folder / "checkpoints" / checkpoint_name(step), output.absolute()
    _refuse_stranger(folder, step, key)
    if key is None and (source / SIGNATURE_NAME).exists():
        raise RequestError(UNCHECKED, field="MEM_MANIFEST_KEY", remedy="Give the key that the run was signed with.")
    target.parent.mkdir(parents=True, exist_ok=True)
    order = ExportOrder(
        checkpoint=str(source.absolute()), run_folder=str(folder.absolute()), output=str(target), dtype=form.dtype, merge=form.merge,
        cache_dir=str(settings.model_cache_dir.absolute()), key=settings.manifest_key or "",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mem_core.runtime.deepspeed.programs.export"],
        env=child_environment(settings, device="cpu"), capture_output=True, text=True, check=False,
        input=order.model_dump_json(), timeout=EXPORT_DEADLINE_S,
    )  # fmt: skip
    if done.returncode == RequestError.exit_code:
        raise RequestError(f"the export was refused: {done.stderr.strip()[-800:]}", remedy="Mend what it names.")
    if done.returncode != 0:
        raise NoValidCheckpoint(f"the export failed: {done.stderr.strip()[-800:]}", remedy="Try another --step, or mem checkpoints verify.")
    return ExportMark.model_validate_json(done.stdout.splitlines()[-1])


def _refuse_stranger(folder: Path, step: int, key: bytes | None) -> None:
    """Weights of another run under this run's name help nobody."""
    present = Catalog(OsDisk(), folder, folder.name, key).read(step)
    foreign = read_identity(folder).foreign(present.manifest, present.sha256)
    if foreign:
        raise NoValidCheckpoint(
            f"the checkpoint of step {step} is not this run's: {'; '.join(foreign)}",
            remedy="Try another --step, or mem checkpoints verify.",
        )


def _choose(catalog: Catalog, step: int | None) -> int:
    valid = sorted(number for number, (_, verdict) in catalog.own().items() if verdict is not None and verdict.valid)
    if step is not None and step in valid:
        return step
    if step is None and valid:
        return valid[-1]
    raise NoValidCheckpoint(
        "there is no valid checkpoint of that step" if step is not None else "there is no valid checkpoint",
        value=step, bound=", ".join(map(str, valid)) or "none yet", remedy="See mem checkpoints list.",
    )  # fmt: skip


def pin_checkpoint(folder: Path, step: int, pinned: bool) -> int:
    """Keep a checkpoint for ever, or let rotation decide again.

    Raises:
        RunHeld: the run is being trained; pin it when it rests.
    """
    key = signature_key(Settings.from_environment())
    state = StateManager.acquire(folder.parent, folder.name)
    try:
        record = state.record()
        if record is None:
            raise RequestError("there is no such run", field="RUN", value=folder, remedy="Give a run id with --store, or a run folder.")
        parallel = record.request.parallel
        expectation = CheckpointExpectation(num_ranks=parallel.num_ranks, zero_stage=parallel.zero_stage)
        scope = CheckpointScope(folder, folder.name, state.attempt, CheckpointSection(), expectation)
        ports = CheckpointPorts(fence=state.fence, emit=state.emit)
        manager = CheckpointManager(scope, ports, IntegrityValidator(signature_key=key), signature_key=key)
        if pinned:
            manager.pin(step)
        else:
            manager.unpin(step)
    finally:
        state.release()
    print(f"step {step:,} {'pinned' if pinned else 'unpinned'}", file=sys.stderr)
    return 0
