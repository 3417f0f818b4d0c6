"""`mem checkpoints export | pin`: a proven checkpoint as a Hugging Face folder; a checkpoint that rotation leaves alone."""

import json
import subprocess
import sys
from pathlib import Path

from flows.commands.checkpoints import UNCHECKED, signature_key
from mem_core.core.run.identity import read_identity
from mem_core.core.run.record import record_of
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.checkpoint import SIGNATURE_NAME, CheckpointExpectation, checkpoint_name
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.ports import CheckpointPorts, CheckpointScope

EXPORT_DEADLINE_S = 3_600.0


def export_checkpoint(folder: Path, step: int | None, output: Path | None, as_json: bool, settings: Settings | None = None) -> int:
    """Write `export/step-N` (or `output`) of the newest valid checkpoint (or `step`); shards are merged and checked.

    Raises:
        RequestError: no such run, or the checkpoint is signed and MEM_MANIFEST_KEY is not set. NoValidCheckpoint: no such
        checkpoint, or it is bad.
    """
    settings = settings or Settings.from_environment()
    key = signature_key(settings)
    record_of(folder)
    chosen = _choose(Catalog(OsDisk(), folder, folder.name, key), step)
    source = folder / "checkpoints" / checkpoint_name(chosen)
    _refuse_stranger(folder, chosen, key)
    if key is None and (source / SIGNATURE_NAME).exists():
        raise RequestError(UNCHECKED, field="MEM_MANIFEST_KEY", remedy="Give the key that the run was signed with.")
    target = (output or folder / "export" / checkpoint_name(chosen)).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mem_core.runtime.deepspeed.programs.export", str(source), str(folder), str(target)],
        env=child_environment(settings, device="cpu"), capture_output=True, text=True, check=False,
        input=settings.manifest_key or "", timeout=EXPORT_DEADLINE_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise NoValidCheckpoint(f"the export failed: {done.stderr.strip()[-800:]}", remedy="Try another --step, or mem checkpoints verify.")
    print(f"step {chosen:,} exported to {target}", file=sys.stderr)
    if as_json:
        print(json.dumps({"step": chosen, "folder": str(target), "weights_digest": done.stdout.split()[-1]}))
    return 0


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
