"""The checkpoints that an audit can begin with: those in a run folder, or the copies in a remote store, brought one at a time."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from mem_core.core.run.identity import RunIdentity
from mem_core.domain.checkpoint import SIGNATURE_NAME, CheckpointManifest, checkpoint_name
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.infrastructure.storage.port import KeyMissing, Store
from mem_core.infrastructure.storage.reading import why
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.file_checks import check_claims, read_manifest
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged, sha256_hex
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator
from mem_core.runtime.checkpoint_manager.mirror.mirror import Mirror
from mem_core.runtime.checkpoint_manager.mirror.remote_layout import Upload, manifest_key


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint as its manifest describes it. `valid`: there is a good verdict on it; only then it is begun with."""

    manifest: CheckpointManifest
    manifest_sha256: str
    valid: bool


class Kept(Protocol):
    """Where a run's checkpoints lie."""

    def manifests(self) -> Mapping[int, KeptCheckpoint]:
        """Every complete checkpoint of the run by its step, ascending. Files are not read for it."""
        ...

    def at_hand(self, step: int) -> contextlib.AbstractContextManager[Path]:
        """The folder of a step for the length of a block; nothing may be written there.

        Raises:
            NoValidCheckpoint: it is gone, or its copy cannot be used.
        """
        ...


@dataclass(frozen=True)
class LocalKept:
    """Of a run folder. The run may go on meanwhile."""

    catalog: Catalog
    run_id: str

    @classmethod
    def of(cls, folder: Path, run_id: str, key: bytes | None) -> "LocalKept":
        """With a key, only what it signed is there."""
        return cls(Catalog(OsDisk(), folder, run_id, key), run_id)

    def manifests(self) -> dict[int, KeptCheckpoint]:
        """See `Kept`."""
        found: dict[int, KeptCheckpoint] = {}
        for step, present in self.catalog.complete():
            if (present.manifest.run_id, present.manifest.step) != (self.run_id, step):
                continue
            verdict = self.catalog.verdict(step, present.sha256)
            found[step] = KeptCheckpoint(present.manifest, present.sha256, verdict is not None and verdict.valid)
        return found

    @contextlib.contextmanager
    def at_hand(self, step: int) -> Iterator[Path]:
        """See `Kept`."""
        path = self.catalog.path(step)
        if not path.is_dir():
            raise NoValidCheckpoint(f"the checkpoint of step {step} was rotated away meanwhile", remedy="Give the same command again.")
        yield path


@dataclass
class RemoteKept:
    """Of a remote store, which holds validated checkpoints only."""

    store: Store
    run_id: str
    _uploads: dict[int, Upload] = field(default_factory=dict[int, Upload])

    def manifests(self) -> dict[int, KeptCheckpoint]:
        """See `Kept`. A copy whose manifest is damaged or gone is none."""
        self._uploads = {upload.step: upload for upload in reversed(self._mirror().available())}
        found: dict[int, KeptCheckpoint] = {}
        for step, upload in sorted(self._uploads.items()):
            with contextlib.suppress(KeyMissing, ManifestDamaged):
                manifest = self._mirror().read_manifest(upload)
                digest = sha256_hex(self.store.read(manifest_key(self.run_id, upload)))
                found[step] = KeptCheckpoint(manifest, digest, True)
        return found

    @contextlib.contextmanager
    def at_hand(self, step: int) -> Iterator[Path]:
        """See `Kept`."""
        with TemporaryDirectory(prefix="mem-audit-") as made:
            folder = Path(made) / checkpoint_name(step)
            folder.mkdir()
            try:
                self._mirror().download(self._uploads[step], folder)
            except (KeyMissing, ManifestDamaged) as exc:
                raise NoValidCheckpoint(f"the copy of step {step} cannot be used: {exc}", remedy="Give the same command again.") from exc
            yield folder

    def _mirror(self) -> Mirror:
        return Mirror(self.store, self.run_id, 1, CheckpointSection(), fence=lambda: None, emit=lambda event: None)  # read, never begun


def reasons_against(path: Path, step: int, identity: RunIdentity, key: bytes | None) -> tuple[str, ...]:
    """Why a checkpoint is not what run, journal and its own manifest say; empty where it is. Reads and hashes every byte.

    Raises:
        RequestError: it is signed, and there is no key to check that with.
    """
    if key is None and (path / SIGNATURE_NAME).exists():
        raise RequestError(
            "the run's checkpoints are signed, and nothing is believed without their key",
            field="MEM_MANIFEST_KEY",
            remedy="Give the key that the run was signed with.",
        )
    try:
        present = read_manifest(OsDisk(), path, key)
        reasons = (*check_claims(present.manifest, step), *identity.foreign(present.manifest, present.sha256))
        return reasons or IntegrityValidator(signature_key=key)(path, present.manifest, "", "integrity").reasons
    except ManifestDamaged as exc:
        return (f"manifest: {exc}",)
    except OSError as exc:
        return (f"it cannot be read ({why(exc)})",)
