"""`mem checkpoints list | verify`: read-only looks at a run's checkpoints."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from mem_core.domain.checkpoint import SIGNATURE_NAME, CheckpointInfo, CheckpointManifest
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.units import format_bytes
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.infrastructure.storage.reading import why
from mem_core.runtime.checkpoint_manager.catalog import Catalog
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
    if not os.path.isdir(folder / "journal"):
        raise RequestError("there is no such run", field="RUN", value=folder, remedy="Give a run id with --store, or a run folder.")
    return Catalog(OsDisk(), folder, folder.name, key)


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
    """Read and judge every committed checkpoint again; exit 74 if any is bad. Changes nothing.

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
    verdicts: list[dict[str, object]] = []
    for step, (manifest, _) in sorted(catalog.own().items()):
        reasons = judge(catalog.path(step), manifest, key) or deeper(catalog.path(step), manifest)
        verdicts.append({"step": step, "valid": not reasons, "reasons": list(reasons), "weights_digest": manifest.weights_digest})
        print(f"step {step:>9,}  {'BAD: ' + '; '.join(reasons) if reasons else 'good'}", file=sys.stderr)
    named = {verdict["step"] for verdict in verdicts if not verdict["valid"]}
    for info in catalog.listing():
        if info.step not in named and info.state in ("incomplete", "invalid"):
            print(f"step {info.step:>9,}  BAD: {info.state} {'; '.join(info.reasons)}", file=sys.stderr)
            verdicts.append({"step": info.step, "valid": False, "reasons": [info.state, *info.reasons]})
    if as_json:
        print(json.dumps(verdicts))
    return 0 if all(verdict["valid"] for verdict in verdicts) else NoValidCheckpoint.exit_code


def judge(path: Path, manifest: CheckpointManifest, key: bytes | None) -> tuple[str, ...]:
    """Reasons why a checkpoint is bad: every file read and hashed, and its signature, which needs the key that made it."""
    if key is None and (path / SIGNATURE_NAME).exists():
        return (UNCHECKED,)
    try:
        return IntegrityValidator(signature_key=key)(path, manifest, "", "integrity").reasons
    except OSError as exc:
        return (f"it cannot be read ({why(exc)})",)
