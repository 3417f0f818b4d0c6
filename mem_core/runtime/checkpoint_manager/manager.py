"""Stage, commit, validate, rotate, find the newest valid: the only writer of a run's checkpoints."""

import contextlib
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from mem_core.domain.checkpoint import (
    CheckpointDraft,
    CheckpointInfo,
    CheckpointManifest,
    CheckpointVerdict,
    RotationPlan,
    checkpoint_name,
)
from mem_core.domain.errors import InternalError, NoValidCheckpoint, StoreUnavailable
from mem_core.domain.events import CheckpointCommitted, Noted
from mem_core.domain.units import format_bytes
from mem_core.infrastructure.storage.disk import is_unavailable, remove_tree, unavailable
from mem_core.runtime.checkpoint_manager.attempt_area import AttemptArea
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ForeignCheckpoint, ManifestDamaged
from mem_core.runtime.checkpoint_manager.inspection.validator import Level, Validator
from mem_core.runtime.checkpoint_manager.judging import Judge
from mem_core.runtime.checkpoint_manager.placing import Placing
from mem_core.runtime.checkpoint_manager.ports import CheckpointPorts, CheckpointScope
from mem_core.runtime.checkpoint_manager.rotation import plan_rotation
from mem_core.runtime.checkpoint_manager.sealing import Sealer

SPACE_FACTOR = 1.2
_SMALL_WRITES_BYTES = 1 << 20


class CheckpointManager:
    """Checkpoints of one run as seen by one attempt.

    Guarantees: after `commit(step)` returned, the newest valid checkpoint is at least that step, whatever crashes (I4); nothing but a
    checkpoint with a valid verdict whose bytes were read again is given to resume from; an attempt that is no longer the newest
    changes nothing (I6). Methods raise `RunHeld` in that case and `StoreUnavailable` when the disk says no. `commit`, `validate` and
    `rotate` may run at the same time in different threads; at most one `commit` at a time, and one manager per attempt, are the
    caller's business. Constructing one acts on nothing.
    """

    def __init__(
        self,
        scope: CheckpointScope,
        ports: CheckpointPorts,
        validator: Validator,
        *,
        signature_key: bytes | None = None,
        initial_weights_digest: str = "",
    ) -> None:
        self._scope, self._ports, self._disk = scope, ports, ports.disk
        self._lock = threading.RLock()
        self._area = AttemptArea(ports.disk, scope.run_folder, scope.attempt)
        self._catalog = Catalog(ports.disk, scope.run_folder, scope.run_id, signature_key)
        self._sealer = Sealer(ports.disk, scope.run_id, scope.attempt, scope.expectation, scope.birth, signature_key, ports.clock)
        self._judge = Judge(scope.run_id, scope.birth, ports, self._area, self._catalog, self._lock, validator, initial_weights_digest)
        self._placing = Placing(ports, self._area, self._catalog, self._judge)
        self._opened = False

    # -- staging and commit -------------------------------------------------------------------------------------------------------

    def new_staging(self, step: int, expected_bytes: int = 0) -> Path:
        """An empty folder on the run's own file system for all ranks' engine files of `step`; commit it or leave it.

        `expected_bytes` is the size of the checkpoint where it is known; the last one's size counts too. Makes room by rotation first.
        With DeepSpeed: `engine.save_checkpoint(staging.parent, tag=staging.name, save_latest=False)`.

        Raises:
            StoreUnavailable: less than 1.2 times that size is free.
        """
        with self._writing():
            self._ports.fence()
            self._make_room(expected_bytes)
            return self._area.new_save(step)

    def commit(self, step: int, staging: Path, draft: CheckpointDraft) -> CheckpointManifest:
        """Make a staged checkpoint durable and visible: fsync files, hash, manifest, fsync, rename, fsync folder.

        All ranks must have finished writing. On any error the checkpoint does not exist and older ones are untouched.

        Raises:
            InternalError: a rank's file is missing, or `staging` is not one that `new_staging` of this attempt gave.
        """
        started_s = self._ports.clock()
        if not self._area.owns_save(staging):
            raise InternalError(f"{staging} is not a staging folder of attempt {self._scope.attempt}", remedy="Report this as a bug.")
        with self._writing(locked=False):
            self._ports.fence()
            sealed = self._sealer.seal(step, staging, draft)
            self._ports.fence()
            self._placing.announce(sealed)
            with self._lock:
                self._placing.publish(step, staging)
                self._area.drop_saves(step)
        manifest = sealed.manifest
        size_bytes = sum(entry.size_bytes for entry in manifest.files)
        self._ports.emit(
            CheckpointCommitted(
                step=step,
                size_bytes=size_bytes,
                duration_s=max(self._ports.clock() - started_s, 0.0),
                weights_digest=manifest.weights_digest,
                trajectory_digest=manifest.position.trajectory_digest,
                manifest_sha256=sealed.sha256,
            )
        )
        return manifest

    def adopt(self, step: int, staging: Path) -> CheckpointManifest:
        """Make a checkpoint durable and visible that comes with its manifest, such as one from a mirror. It still has to be validated.

        Its bytes need not be those that this journal names (another machine may have done the step again), its digests must be.

        Raises:
            ManifestDamaged: manifest, signature or any file is not what the manifest says; the folder is removed.
            ForeignCheckpoint: it is whole and not this run's; the folder is removed.
        """
        with self._writing(locked=False):
            self._ports.fence()
            try:
                present = self._sealer.prove_again(step, staging)
                foreign = self._judge.belonging(present, bytes_too=False).foreign
                if foreign:
                    raise ForeignCheckpoint("; ".join(foreign))
            except ManifestDamaged:
                self.discard(staging)
                raise
            self._placing.announce(present)
            with self._lock:
                self._placing.publish(step, staging)
        return present.manifest

    def discard(self, staging: Path) -> None:
        """Remove a staged folder that will not be committed (its save failed); what cannot be removed goes with the next clean-up."""
        if self._area.owns_save(staging):
            with contextlib.suppress(OSError):
                remove_tree(self._disk, staging)

    def clean_staging(self) -> None:
        """Shut older attempts out and remove what they left in staging. Every writing method does it once by itself."""
        with self._writing():
            self._area.empty_trash()

    def close(self) -> None:
        """Leave no staging behind: the run is over, or this attempt gives up. Never raises for what cannot be removed."""
        with self._lock, contextlib.suppress(OSError):
            if self._opened:
                self._opened = False
                remove_tree(self._disk, self._area.folder)

    def note(self, text: str) -> None:
        """A line about the run's checkpoints, in its journal and for people."""
        self._ports.emit(Noted(text=text))
        self._ports.tell(text)

    # -- validation ---------------------------------------------------------------------------------------------------------------

    def validate(self, step: int, level: Level | None = None) -> CheckpointVerdict:
        """Judge a committed checkpoint and publish the verdict; a bad one goes to quarantine. A verdict once given is not given again.

        `level` defaults to the request's. What the validator raises passes through, and then there is no verdict.

        Raises:
            NoValidCheckpoint: there is no complete checkpoint of that step.
        """
        with self._writing(locked=False):
            return self._judge.validate(step, level or self._scope.section.validation)

    def newest_valid(self, *, recheck: bool = True, leave_out: Collection[int] = ()) -> CheckpointManifest | None:
        """Where to resume: newest to oldest by number, each skip emitted with its reason, bad ones quarantined.

        What is not this run's is set aside first, whatever its step (`core/run/belonging.py`). Steps to `leave_out` stay where they are.

        A complete checkpoint without verdict is validated first. With `recheck` the bytes of a validated one are read again (SHA-256 and
        pickle scan), since disks rot after a verdict. None: there are none yet, training starts at step 0 (emitted).

        Raises:
            NoValidCheckpoint: some exist or were quarantined, and none is valid.
            RequestError: the newest sound one was saved for other ranks, another stage or another model.
        """
        with self._writing(locked=False):
            return self._judge.newest_valid(self._scope.expectation, self._scope.section.validation, recheck, leave_out)

    def set_strangers_aside(self) -> None:
        """Move every checkpoint of this run id that is not this run's to quarantine, and say so."""
        with self._writing(locked=False):
            self._judge.set_strangers_aside(self._scope.section.validation)

    def set_aside(self, step: int, reason: str) -> None:
        """Take a checkpoint that is whole out of the way for a reason that its bytes do not show; a person may put it back."""
        with self._writing(locked=False):
            self._judge.set_aside(step, (reason,), self._scope.section.validation)

    # -- keeping and looking ------------------------------------------------------------------------------------------------------

    def rotate(self) -> RotationPlan:
        """Remove what the request does not ask to keep, after something newer was validated. A deletion that fails is only noted."""
        with self._writing():
            own = self._catalog.own()
            verdicts = {step: verdict for step, (_, verdict) in own.items() if verdict is not None}
            plan = plan_rotation(tuple(own), verdicts, self._scope.section, self._catalog.pinned() | frozenset(self._ports.held()))
            for step in plan.remove:
                self._ports.fence()
                self._placing.remove(step)
            for stuck in self._area.empty_trash():
                self._ports.emit(Noted(text=f"could not be deleted and will be tried again: {stuck}"))
            return plan

    def listing(self) -> tuple[CheckpointInfo, ...]:
        """Every checkpoint, good or not, ascending by step. Reads only."""
        return self._catalog.listing()

    def manifests(self) -> dict[int, CheckpointManifest]:
        """Complete checkpoints of this run in any shape, ascending by step, judged or not. Reads only."""
        return {step: manifest for step, (manifest, _) in self._catalog.own().items()}

    @property
    def has_history(self) -> bool:
        """Whether this run ever saved anything, as far as its journal knows."""
        return self._ports.words.any_said

    def path_of(self, step: int) -> Path:
        """Folder of a committed checkpoint: engine files lie directly in it."""
        return self._catalog.path(step)

    def pin(self, step: int) -> None:
        """Never rotate this one away.

        Raises:
            NoValidCheckpoint: there is no complete checkpoint of that step.
        """
        with self._writing():
            if step not in self._catalog.own():
                raise NoValidCheckpoint(f"no complete checkpoint of step {step} to pin", remedy="List them with `mem checkpoints list`.")
            if self._disk.kind(self._catalog.pins) is None:
                self._disk.make_folder(self._catalog.pins)
                self._disk.sync_folder(self._scope.run_folder)
            self._area.publish_file(b"", self._catalog.pins / checkpoint_name(step))

    def unpin(self, step: int) -> None:
        """Let rotation decide again; no error if it was not pinned."""
        with self._writing(), contextlib.suppress(FileNotFoundError):
            self._disk.remove_file(self._catalog.pins / checkpoint_name(step))

    # -- inside -------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self, *, locked: bool = True) -> Iterator[None]:
        """Open once, translate what the disk says, hold the lock if asked."""
        try:
            with self._lock:
                if not self._opened:
                    self._area.take_over(self._ports.fence)
                    self._opened = True
            with self._area.fenced(), self._lock if locked else contextlib.nullcontext():
                yield
        except OSError as exc:
            if not is_unavailable(exc):
                raise
            raise unavailable(exc, self._scope.run_folder, self._disk) from exc

    def _make_room(self, expected_bytes: int) -> None:
        sizes = [sum(entry.size_bytes for entry in manifest.files) for manifest, _ in self._catalog.own().values()]
        needed_bytes = int(SPACE_FACTOR * max(expected_bytes, *sizes[-1:], 0)) + _SMALL_WRITES_BYTES
        if self._disk.free_bytes(self._scope.run_folder) < needed_bytes:
            self.rotate()
        free_bytes = self._disk.free_bytes(self._scope.run_folder)
        if free_bytes < needed_bytes:
            raise StoreUnavailable(
                f"the disk of {self._scope.run_folder} is too full for the next checkpoint",
                field="store",
                value=f"{format_bytes(free_bytes)} free",
                bound=f"at least {format_bytes(needed_bytes)} free",
                remedy="Free space or lower checkpoint.keep_last; older checkpoints are kept and the same command goes on from them.",
            )
