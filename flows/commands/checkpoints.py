"""`mem checkpoints list | verify`: read-only looks at a run's checkpoints."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mem_core.core.run.identity import RunIdentity, read_identity
from mem_core.domain.checkpoint import SIGNATURE_NAME, CheckpointInfo, CheckpointManifest
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.units import format_bytes
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.infrastructure.storage.reading import why
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.file_checks import check_claims
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged
from mem_core.runtime.checkpoint_manager.inspection.validator import IntegrityValidator

Deeper = Callable[[Path, CheckpointManifest], tuple[str, ...]]
"""(folder, manifest) of a checkpoint that is sound in itself -> reasons why it is bad all the same."""
UNCHECKED = "it is signed and there is no key to check that with: set MEM_MANIFEST_KEY"


def signature_key(settings: Settings) -> bytes | None:
    """MEM_MANIFEST_KEY as bytes; None where it is not set."""
    return settings.manifest_key.encode() if settings.manifest_key else None


def open_catalog(folder: Path, key: bytes | None) -> Catalog:
    """A run's checkpoints; with a key, only those that it signed are believed.

    Raises:
        RequestError: no such run.
    """
    if not os.path.isdir(folder / "journal") and not os.path.isdir(folder / "checkpoints"):
        raise RequestError("there is no such run", field="RUN", value=folder, remedy="Give a run id with --store, or a run folder.")
    return Catalog(OsDisk(), folder, read_identity(folder).run_id, key)


def list_checkpoints(folder: Path, as_json: bool, settings: Settings | None = None) -> int:
    """Every checkpoint with its state; files are not read."""
    infos = open_catalog(folder, signature_key(settings or Settings.from_environment())).listing()
    for info in infos:
        print(_line(info), file=sys.stderr)
    if not infos:
        print("no checkpoints", file=sys.stderr)
    if as_json:
        print(json.dumps([info.model_dump(mode="json") for info in infos]))
    return 0


def _line(info: CheckpointInfo) -> str:
    pinned = ", pinned" if info.pinned else ""
    why = f": {'; '.join(info.reasons)}" if info.reasons else ""
    return f"step {info.step:>9,}  {info.state:<12} {format_bytes(info.size_bytes):>10}{pinned}{why}"


def verify_checkpoints(folder: Path, as_json: bool, deep: bool = False, settings: Settings | None = None) -> int:
    """Read and judge every folder among a run's checkpoints; exit 74 if any is bad or was never judged. Changes nothing.

    `deep` restores each sound one in fresh processes too and takes two steps: with the losses that the run recorded, where it did.
    """
    settings = settings or Settings.from_environment()
    key = signature_key(settings)
    catalog = open_catalog(folder, key)
    if not deep:
        return _verify(catalog, key, as_json, lambda path, manifest: ())
    from mem_core.runtime.proof.deep_verify import stepping

    with stepping(folder, settings, lambda text: print(text, file=sys.stderr)) as deeper:
        return _verify(catalog, key, as_json, deeper)


def _verify(catalog: Catalog, key: bytes | None, as_json: bool, deeper: Deeper) -> int:
    identity = read_identity(catalog.folder.parent)
    verdicts = [_look_at(catalog, step, identity, key, deeper) for step in catalog.steps()]
    verdicts += [Look(-1, ("it is no checkpoint's folder (a link counts as none)",), name=name) for name in catalog.strangers()]
    for verdict in verdicts:
        print(verdict.line, file=sys.stderr)
    if as_json:
        print(json.dumps([verdict.row for verdict in verdicts]))
    return 0 if all(not verdict.reasons for verdict in verdicts) else NoValidCheckpoint.exit_code


@dataclass(frozen=True)
class Look:
    """What was found in one folder; good where there are no reasons against it."""

    step: int
    reasons: tuple[str, ...]
    weights_digest: str = ""
    judged: bool = True
    name: str = ""

    @property
    def line(self) -> str:
        """For people."""
        state = "good" if not self.reasons else f"{'BAD' if self.judged else 'not judged'}: {'; '.join(self.reasons)}"
        return f"{self.name or f'step {self.step:>9,}'}  {state}"

    @property
    def row(self) -> dict[str, object]:
        """For machines."""
        digest = {"weights_digest": self.weights_digest} if self.weights_digest else {}
        which: dict[str, object] = {"name": self.name} if self.name else {"step": self.step}
        return {**which, "valid": not self.reasons, "reasons": list(self.reasons), "judged": self.judged, **digest}


def _look_at(catalog: Catalog, step: int, identity: RunIdentity, key: bytes | None, deeper: Deeper) -> Look:
    """Whose it is, whether it says so where it lies, whether its bytes hold, and whether anybody has judged it."""
    try:
        present = catalog.read(step)
    except FileNotFoundError:
        return Look(step, ("incomplete: no manifest",))
    except ManifestDamaged as exc:
        return Look(step, (f"manifest: {exc}",))
    manifest, path = present.manifest, catalog.path(step)
    reasons = (*check_claims(manifest, step), *identity.foreign(manifest, present.sha256))
    reasons = reasons or judge(path, manifest, key) or deeper(path, manifest)
    verdict = catalog.verdict(step, present.sha256)
    if not reasons and verdict is not None and not verdict.valid:
        reasons = (f"its verdict says so: {'; '.join(verdict.reasons)}",)
    if not reasons and verdict is None:
        return Look(
            step, ("it holds, and it has no verdict yet; the next start of the run judges it",), manifest.weights_digest, judged=False
        )
    return Look(step, reasons, manifest.weights_digest)


def judge(path: Path, manifest: CheckpointManifest, key: bytes | None) -> tuple[str, ...]:
    """Reasons why a checkpoint is bad: every file read and hashed, and its signature, which needs the key that made it."""
    if key is None and (path / SIGNATURE_NAME).exists():
        return (UNCHECKED,)
    try:
        return IntegrityValidator(signature_key=key)(path, manifest, "", "integrity").reasons
    except OSError as exc:
        return (f"it cannot be read ({why(exc)})",)
