"""Puts a sealed checkpoint where readers see it, and takes one away: one rename each, with what lies there already moved aside first."""

from dataclasses import dataclass
from pathlib import Path

from mem_core.domain.events import CheckpointRemoved, CheckpointSealed, Noted
from mem_core.runtime.checkpoint_manager.attempt_area import AttemptArea
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.file_checks import ManifestOnDisk
from mem_core.runtime.checkpoint_manager.judging import QUARANTINE_KEEP, Judge
from mem_core.runtime.checkpoint_manager.ports import CheckpointPorts


@dataclass(frozen=True)
class Placing:
    """The placing half of `CheckpointManager`, which opens the run folder, holds its lock and translates errors around every call."""

    ports: CheckpointPorts
    area: AttemptArea
    catalog: Catalog
    judge: Judge

    def announce(self, sealed: ManifestOnDisk) -> None:
        """Journal what is about to lie at a step before it can be seen there."""
        manifest = sealed.manifest
        self.ports.emit(
            CheckpointSealed(
                step=manifest.step,
                manifest_sha256=sealed.sha256,
                weights_digest=manifest.weights_digest,
                trajectory_digest=manifest.position.trajectory_digest,
            )
        )

    def publish(self, step: int, staging: Path) -> None:
        """The moment of truth: one rename. What was there before is moved aside and put back by `take_over` if we die in between."""
        disk, target = self.ports.disk, self.catalog.path(step)
        self.area.make_again(target.parent)  # somebody may have removed it under the live run, whose engine is sound
        before = self._cleared(step)
        try:
            disk.rename(staging, target)
        except OSError:
            if before is not None:
                disk.rename(before, target)
            raise
        disk.sync_folder(target.parent)
        disk.sync_folder(self.area.folder)
        self.area.empty_trash()

    def remove(self, step: int) -> None:
        """Rename to the desk first, so that a half-deleted folder is never seen as a checkpoint."""
        try:
            self.area.aside("trash", self.catalog.path(step))
        except FileNotFoundError:
            return  # already gone
        except OSError as exc:
            self.ports.emit(Noted(text=f"checkpoint of step {step} could not be deleted and will be tried again: {exc.strerror or exc}"))
            return
        self.ports.emit(CheckpointRemoved(step=step, reason="rotation"))

    def _cleared(self, step: int) -> Path | None:
        """Make way for a step; returns where its own older checkpoint lies now. Another run's goes to quarantine and is never deleted."""
        target = self.catalog.path(step)
        if self.ports.disk.kind(target) is None:
            return None
        if not self.judge.is_stranger(step):
            return self.area.aside("replaced", target)
        self.area.to_quarantine(target, QUARANTINE_KEEP, whole=True)
        self.ports.emit(Noted(text=f"a checkpoint of another run lay at step {step}; it is in quarantine"))
        return None
