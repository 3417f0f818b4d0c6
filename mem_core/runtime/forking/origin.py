"""The run that a fork comes from: where it lies, which of its checkpoints is meant, and that this one is proven."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from mem_core.core.results.evaluations import best_step
from mem_core.core.run.identity import read_identity
from mem_core.core.run.record import RunRecord, record_of
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import SIGNATURE_NAME, CheckpointManifest, checkpoint_name
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.events import JournalLine
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.infrastructure.storage.port import KeyMissing, Store
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.file_checks import check_claims
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
from mem_core.runtime.checkpoint_manager.mirror.mirror import Mirror
from mem_core.runtime.session.remote_service import fetch_record

Wanted = int | Literal["best", "newest"]
_LIST = "See mem checkpoints list."


@dataclass(frozen=True)
class Origin:
    """A run with the checkpoint that is taken: read, hashed and judged. `shown`: where it lies, for people."""

    record: RunRecord
    lines: tuple[JournalLine, ...]
    manifest: CheckpointManifest
    manifest_sha256: str
    checkpoint: Path
    metrics: Path
    shown: str


def local_origin(folder: Path, wanted: Wanted, key: bytes | None) -> Origin:
    """The checkpoint that is wanted of the run in `folder`. The run may train meanwhile.

    Raises:
        RequestError: no such run, or it has no best step. NoValidCheckpoint: no such checkpoint, or it does not prove itself.
    """
    record, lines = record_of(folder), tuple(read_journal(folder / "journal"))
    catalog = Catalog(OsDisk(), folder, record.run_id, key)
    valid = sorted(step for step, (_, verdict) in catalog.own().items() if verdict is not None and verdict.valid)
    return _proven(record, lines, folder, chosen(wanted, valid, lines), key, str(folder))


@contextlib.contextmanager
def remote_origin(store: Store, run_id: str, wanted: Wanted, key: bytes | None, room: Path) -> Iterator[Origin]:
    """The same of a run in a remote store, whose checkpoint is brought to a folder in `room` for as long as the block lasts.

    Raises:
        As `local_origin`, and StoreUnavailable.
    """
    with TemporaryDirectory(dir=room, prefix=".fetching-") as made:
        folder = Path(made) / run_id
        if not fetch_record(store, run_id, folder):
            raise RequestError("there is no such run", field="RUN", value=f"{store.url}/{run_id}", remedy="See mem runs --store URL.")
        record, lines = record_of(folder), tuple(read_journal(folder / "journal"))
        mirror = Mirror(store, run_id, 1, CheckpointSection(), fence=lambda: None, emit=lambda event: None)  # read, never begun
        uploads = {upload.step: upload for upload in reversed(mirror.available())}
        step = chosen(wanted, sorted(uploads), lines)
        target = folder / "checkpoints" / checkpoint_name(step)
        target.mkdir(parents=True)
        try:
            mirror.download(uploads[step], target)
        except (KeyMissing, ManifestDamaged) as exc:
            raise NoValidCheckpoint(f"the copy of step {step} cannot be used: {exc}", remedy="Try another step.") from exc
        yield _proven(record, lines, folder, step, key, f"{store.url}/{run_id}")


def chosen(wanted: Wanted, valid: list[int], lines: tuple[JournalLine, ...]) -> int:
    """Which of the validated steps (ascending) is meant.

    Raises:
        RequestError: the run has no best step. NoValidCheckpoint: the step is not among them.
    """
    step = (
        wanted if isinstance(wanted, int) else max(valid, default=None) if wanted == "newest" else best_step(lines, "RUN@best", "RUN@STEP")
    )
    if step is not None and step in valid:
        return step
    what = f"the {wanted} step {step}" if wanted == "best" else "that step" if step is not None else "any step"
    raise NoValidCheckpoint(
        f"there is no validated checkpoint of {what}", value=step, bound=", ".join(map(str, valid)) or "none yet",
        remedy=f"{_LIST} Rotation keeps checkpoint.keep_last of them, and the best one with evaluation.keep_best.",
    )  # fmt: skip


def _proven(record: RunRecord, lines: tuple[JournalLine, ...], folder: Path, step: int, key: bytes | None, shown: str) -> Origin:
    """Every byte read, hashed and judged, and held against the run's birth and its journal."""
    catalog = Catalog(OsDisk(), folder, record.run_id, key)
    path = catalog.path(step)
    try:
        present = catalog.read(step)
    except ManifestDamaged as exc:
        raise _bad(step, f"manifest: {exc}") from exc
    except FileNotFoundError as exc:
        raise NoValidCheckpoint(f"the checkpoint of step {step} was rotated away meanwhile", remedy=_LIST) from exc
    manifest = present.manifest
    reasons = (*check_claims(manifest, step, record.run_id), *read_identity(folder).foreign(manifest, present.sha256))
    if key is None and (path / SIGNATURE_NAME).exists():
        reasons = (*reasons, "it is signed and there is no key to check that with: set MEM_MANIFEST_KEY")
    reasons = reasons or IntegrityValidator(signature_key=key)(path, manifest, "", "integrity").reasons
    if reasons:
        raise _bad(step, "; ".join(reasons))
    return Origin(record, lines, manifest, present.sha256, path, folder / "metrics", shown)


def _bad(step: int, why: str) -> NoValidCheckpoint:
    return NoValidCheckpoint(f"the checkpoint of step {step} is bad, and nothing was forked: {why}", remedy=f"Try another step. {_LIST}")
