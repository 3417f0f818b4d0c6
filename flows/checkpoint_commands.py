"""`mem checkpoints list | verify`: read-only looks at a run's checkpoints."""

import json
import sys
from pathlib import Path

from mem_core.domain.checkpoint import CheckpointInfo, CheckpointManifest
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.units import format_bytes
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.validator import IntegrityValidator


def _catalog(folder: Path) -> Catalog:
    if not (folder / "journal").is_dir():
        raise RequestError("there is no such run", field="RUN", value=folder, remedy="Give a run id with --store, or a run folder.")
    return Catalog(OsDisk(), folder, folder.name, None)


def list_checkpoints(folder: Path, as_json: bool) -> int:
    """Every checkpoint with its state; files are not read."""
    infos = _catalog(folder).listing()
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


def verify_checkpoints(folder: Path, as_json: bool) -> int:
    """Read and judge every committed checkpoint again; exit 74 if any is bad. Changes nothing."""
    catalog = _catalog(folder)
    verdicts = []
    for step, (manifest, _) in sorted(catalog.own().items()):
        verdicts.append(_judge(catalog.path(step), manifest))
        state = "good" if verdicts[-1]["valid"] else f"BAD: {'; '.join(verdicts[-1]['reasons'])}"
        print(f"step {step:>9,}  {state}", file=sys.stderr)
    broken = [info for info in catalog.listing() if info.state in ("incomplete", "invalid")]
    for info in broken:
        print(f"step {info.step:>9,}  BAD: {info.state} {'; '.join(info.reasons)}", file=sys.stderr)
        verdicts.append({"step": info.step, "valid": False, "reasons": [info.state, *info.reasons]})
    if as_json:
        print(json.dumps(verdicts))
    return 0 if all(verdict["valid"] for verdict in verdicts) else NoValidCheckpoint.exit_code


def _judge(path: Path, manifest: CheckpointManifest) -> dict[str, object]:
    verdict = IntegrityValidator()(path, manifest, "", "integrity")
    return {"step": manifest.step, "valid": verdict.valid, "reasons": list(verdict.reasons), "weights_digest": manifest.weights_digest}
