"""Brings a run's newest checkpoint into another shape (ranks, ZeRO stage), proven before it takes the old one's place.

The source is judged, then converted by DeepSpeed in a process of its own. Fresh ranks of the new shape load the result and save
an ordinary checkpoint, whose weights must have the recorded digest. Then fresh ranks of the old shape take two steps from the old
files, and fresh ranks of the new shape two from the new files: equal losses and gradient norms up to rounding show that the
optimizer's state came along. Only then is the new checkpoint committed; whatever fails before leaves the old one as it was.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mem_core.core.run.reshard import describe_shape, refuse_inconvertible, shape_note, shape_of, with_shape
from mem_core.core.run.state_manager import RunRecord, StateManager
from mem_core.domain.checkpoint import CheckpointDraft, CheckpointManifest
from mem_core.domain.errors import NoValidCheckpoint, StoreUnavailable
from mem_core.domain.events import Event, Noted
from mem_core.domain.segment import describe_failure
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.proof.replay_service import UNRECORDED_STEPS, take_steps
from mem_core.runtime.ranks.port import GroupFailed, Ranks, Watch
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence, Train, WorkerSpec

CONVERT_DEADLINE_S = 3_600.0
SAVE_DEADLINE_S = 1_800.0
SIZE_FACTOR = 3  # the universal form and the new checkpoint lie beside the old one for a while
RELATIVE_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}
"""Other ranks and stages add the same numbers in another order; the reduced formats round the gradients in between."""


@dataclass
class ReshardService:
    """One conversion at the start of an attempt. `spec` and `manager` are of the new shape."""

    manager: CheckpointManager
    ranks: Ranks
    spec: WorkerSpec
    environ: dict[str, str]
    emit: Callable[[Event], object]
    key: bytes | None = None
    on_converted: Callable[[Path], None] = lambda folder: None
    skip_batches: tuple[int, ...] = ()

    def run(self) -> CheckpointManifest | None:
        """Convert the newest sound checkpoint where its shape is another; None where nothing was to be done.

        Raises:
            RequestError: it cannot be converted to this shape. NoValidCheckpoint: the converted one did not prove itself.
        """
        manifest = self._newest_sound()
        if manifest is None or (manifest.num_ranks, manifest.zero_stage) == shape_of(self.spec.request):
            return None
        refuse_inconvertible(manifest, *shape_of(self.spec.request))
        size_bytes = sum(entry.size_bytes for entry in manifest.files)
        scratch = self.manager.new_staging(manifest.step, expected_bytes=SIZE_FACTOR * size_bytes)
        staging = self.manager.new_staging(manifest.step)
        try:
            self._save_in_new_shape(manifest, self._universal(manifest, scratch), staging)
            self.manager.discard(scratch)
            self._prove(manifest, staging)
            return self._commit(manifest, staging)
        finally:
            self.manager.discard(scratch)
            self.manager.discard(staging)

    def _newest_sound(self) -> CheckpointManifest | None:
        """Newest first; what is bad is quarantined by its verdict. The converter reads every byte of the chosen one again."""
        for step, manifest in reversed(self.manager.manifests().items()):
            if (manifest.num_ranks, manifest.zero_stage) == shape_of(self.spec.request):
                return manifest
            verdict = self.manager.validate(step, "integrity")
            if verdict.valid:
                return manifest
            self.emit(Noted(text=f"checkpoint of step {step} skipped: {'; '.join(verdict.reasons)}"))
        return None

    def _universal(self, manifest: CheckpointManifest, scratch: Path) -> Path:
        """The converted folder; a stage-0 checkpoint is one for any number of ranks as it is."""
        source = self.manager.path_of(manifest.step)
        if manifest.zero_stage == 0:
            return source
        output = scratch / source.name
        program, stage = "mem_core.runtime.deepspeed.programs.reshard", str(shape_of(self.spec.request)[1])
        done = subprocess.run(
            [sys.executable, "-P", "-m", program, str(source), str(output), stage],
            env=self.environ, input=self.key or b"", capture_output=True, timeout=CONVERT_DEADLINE_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            text = done.stderr.decode(errors="replace").strip()[-800:]
            raise NoValidCheckpoint(
                f"the checkpoint of step {manifest.step} could not be converted: {text}",
                remedy="Resume in the shape that it was saved in; it is unchanged.",
            )
        self.on_converted(output)
        return output

    def _save_in_new_shape(self, manifest: CheckpointManifest, source: Path, staging: Path) -> None:
        """Fresh ranks load `source` and save at once; raises where their weights are not those that were saved."""
        group = self.ranks.start(self.spec, Watch(purpose="reshard"))
        position = manifest.position
        try:
            group.restore(str(source), position, position.batch_index + 1)
            group.train(Train(manifest.step, position.hyperparams, str(staging)), lambda beats: None, lambda: False)
            replies = group.wait_saved(manifest.step, SAVE_DEADLINE_S)
        except GroupFailed as exc:
            raise self._unproven(manifest, describe_failure(exc.failure)) from exc
        finally:
            group.stop()
        errors = [reply.error for reply in replies if reply.error]
        if errors:
            raise StoreUnavailable(f"the converted checkpoint could not be written: {errors[0]}", remedy="Free space, then start again.")
        digest = next((reply.weights_digest for reply in replies if reply.weights_digest), "")
        if digest != manifest.weights_digest:
            raise self._unproven(manifest, f"its weights are {digest[:16]}, saved were {manifest.weights_digest[:16]}")

    def _prove(self, manifest: CheckpointManifest, staging: Path) -> None:
        """Two steps in the old shape from the old files, two in the new from the new files; raises where they differ."""
        old = replace(self.spec, request=with_shape(self.spec.request, manifest.num_ranks, manifest.zero_stage))
        before = self._steps(old, self.manager.path_of(manifest.step), manifest)
        after = self._steps(self.spec, staging, manifest)
        reasons = differences(before, after, RELATIVE_TOLERANCE[self.spec.dtype])
        if reasons:
            raise self._unproven(manifest, "; ".join(reasons))

    def _steps(self, spec: WorkerSpec, folder: Path, manifest: CheckpointManifest) -> ReplayEvidence:
        try:
            return take_steps(self.ranks, spec, folder, manifest.position, UNRECORDED_STEPS, None, self.skip_batches)
        except GroupFailed as exc:
            shape = describe_shape(spec.num_ranks, spec.request.parallel.zero_stage)
            raise self._unproven(manifest, f"no two steps could be taken with {shape}: {describe_failure(exc.failure)}") from exc

    def _commit(self, manifest: CheckpointManifest, staging: Path) -> CheckpointManifest:
        origin = {"num_ranks": manifest.num_ranks, "zero_stage": manifest.zero_stage, "manifest_sha256": manifest.manifest_sha256}
        fields = {name: getattr(manifest, name) for name in CheckpointDraft.model_fields}
        draft = CheckpointDraft.model_validate(fields | {"extra": {**manifest.extra, "resharded_from": origin}})
        committed = self.manager.commit(manifest.step, staging, draft)
        verdict = self.manager.validate(manifest.step, "integrity")
        if not verdict.valid:
            raise self._unproven(manifest, "; ".join(verdict.reasons))
        self.emit(
            Noted(
                text=f"checkpoint of step {manifest.step} converted from {describe_shape(manifest.num_ranks, manifest.zero_stage)} to "
                f"{describe_shape(*shape_of(self.spec.request))}: same weights, two steps equal up to rounding"
            )
        )
        return committed

    def _unproven(self, manifest: CheckpointManifest, why: str) -> NoValidCheckpoint:
        return NoValidCheckpoint(
            f"the checkpoint of step {manifest.step} did not prove itself as {describe_shape(*shape_of(self.spec.request))}: {why}",
            remedy=f"Go on with {describe_shape(manifest.num_ranks, manifest.zero_stage)}.",
        )


def reshard_run(
    service: ReshardService, state: StateManager, record: RunRecord, on_valid: Callable[[int, Path], None] = lambda step, folder: None
) -> None:
    """Convert where needed, then write what the run is from now on; `on_valid` is told of the new checkpoint: the mirror.

    A crash in between is harmless: the same command finds the checkpoint converted already, or not yet.

    Raises:
        RequestError: this conversion is not possible. NoValidCheckpoint: its result did not prove itself; nothing has changed then.
    """
    committed = service.run()
    state.write_record(record)
    state.emit(Noted(text=shape_note(record.request)))
    if committed is not None:
        on_valid(committed.step, service.manager.path_of(committed.step))


def differences(before: ReplayEvidence, after: ReplayEvidence, tolerance: float) -> tuple[str, ...]:
    """Steps whose loss or gradient norm differs by more than rounding."""
    reasons: list[str] = []
    for name, old, new in (("loss", before.losses, after.losses), ("gradient norm", before.grad_norms, after.grad_norms)):
        for number, (one, other) in enumerate(zip(old, new, strict=True), start=1):
            if one is None or other is None:
                continue  # stages differ in what they tell
            if not math.isclose(one, other, rel_tol=tolerance):
                reasons.append(f"{name} of step {before.step + number} is {other!r}, in the old shape {one!r}")
    return tuple(reasons)
