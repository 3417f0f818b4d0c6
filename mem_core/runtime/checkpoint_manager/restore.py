"""Where to resume: the local disk, or the mirror where that has more (a new machine with an empty disk)."""

from collections.abc import Callable

from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.domain.errors import NoValidCheckpoint, StoreUnavailable
from mem_core.domain.events import Event, Noted
from mem_core.infrastructure.storage.port import KeyMissing
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ForeignCheckpoint, ManifestDamaged
from mem_core.runtime.checkpoint_manager.manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.mirror.mirror import Mirror


def resume_point(manager: CheckpointManager, mirror: Mirror | None, emit: Callable[[Event], object]) -> CheckpointManifest | None:
    """The newest valid checkpoint of local disk and mirror, on the local disk when this returns; None if there is none anywhere.

    A mirror that is away does not stop a run that has a local checkpoint (emitted). Without one it does: a start at 0 while the mirror
    may hold the run would be a silent loss.

    Raises:
        NoValidCheckpoint: the local disk has only bad ones and the mirror nothing.
        StoreUnavailable: the mirror is away and the local disk has nothing.
        RunHeld: a newer attempt has begun.
    """
    if mirror is None:
        return manager.newest_valid()
    problem: NoValidCheckpoint | None = None
    try:
        local = manager.newest_valid()
    except NoValidCheckpoint as exc:
        local, problem = None, exc
    try:
        restored = restore_from_mirror(manager, mirror, emit, newer_than=local.step if local else -1)
    except StoreUnavailable as exc:
        if local is None:
            raise
        emit(Noted(text=f"resuming from local step {local.step}, the mirror is away: {exc}"))
        return local
    if restored is None and local is None and problem is not None:
        raise problem
    return restored or local


def restore_from_mirror(
    manager: CheckpointManager, mirror: Mirror, emit: Callable[[Event], object], newer_than: int = -1
) -> CheckpointManifest | None:
    """Bring the best mirrored checkpoint beyond step `newer_than` to the local disk and judge it here. None if there is none (emitted).

    Each one that cannot be used is emitted with its reason and the next older one is tried.

    Raises:
        NoValidCheckpoint: what lies there is of another life of the run id, and this one has saved nothing yet.
        StoreUnavailable: the mirror or the local disk is away.
        RunHeld: a newer attempt has begun.
    """
    mirror.begin()
    foreign: list[str] = []
    for upload in mirror.available():
        if upload.step <= newer_than:
            continue
        try:
            size_bytes = sum(entry.size_bytes for entry in mirror.read_manifest(upload).files)
            staging = manager.new_staging(upload.step, expected_bytes=size_bytes)
            mirror.download(upload, staging)
            manifest = manager.adopt(upload.step, staging)
        except ForeignCheckpoint as exc:
            foreign.append(f"step {upload.step}: {exc}")
            manager.note(f"mirrored step {upload.step} of attempt {upload.attempt} is not this run's and is left alone: {exc}")
            continue
        except (KeyMissing, ManifestDamaged) as exc:
            emit(Noted(text=f"mirrored step {upload.step} of attempt {upload.attempt} skipped: {exc}"))
            continue
        verdict = manager.validate(upload.step)
        if verdict.valid:
            emit(Noted(text=f"step {upload.step} restored from {mirror.url}"))
            return manifest
        emit(Noted(text=f"mirrored step {upload.step} of attempt {upload.attempt} skipped: {'; '.join(verdict.reasons)}"))
    if foreign and not manager.has_history:
        raise NoValidCheckpoint(
            f"checkpoints of another life of the run lie in {mirror.url}: {'; '.join(foreign)[:600]}",
            remedy="Give another run_id or another checkpoint.mirror, or move what lies there away; nothing was touched.",
        )
    emit(
        Noted(
            text=f"mirror {mirror.url} has no checkpoint beyond step {newer_than}" if newer_than >= 0 else f"mirror {mirror.url} is empty"
        )
    )
    return None
