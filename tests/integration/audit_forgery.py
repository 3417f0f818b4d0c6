"""What somebody who may write into a run folder, and knows how MEM works, can make of it: every digest and chain is right again."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mem_core.core.run.record import RECORD_NAME, SEAL_NAME, seal
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import MANIFEST_NAME, VERDICT_NAME, CheckpointManifest
from mem_core.domain.events import EVENT_ADAPTER, GENESIS_SHA256, Event
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import encode_manifest, sha256_hex

Edit = Callable[[dict[str, Any]], None]
"""Changes an event, as plain JSON, in place."""


def edit_journal(folder: Path, edit: Edit) -> None:
    """Rewrite every line with a hash chain that holds."""
    lines, previous = read_journal(folder / "journal"), GENESIS_SHA256
    written: dict[int, list[bytes]] = {}
    for line in lines:
        event = line.event.model_dump(mode="json")
        edit(event)
        parsed: Event = EVENT_ADAPTER.validate_python(event)
        raw = line.model_copy(update={"event": parsed, "previous_sha256": previous}).model_dump_json().encode()
        previous = hashlib.sha256(raw).hexdigest()
        written.setdefault(line.attempt, []).append(raw)
    for attempt, raws in written.items():
        (folder / "journal" / f"attempt-{attempt:04d}.jsonl").write_bytes(b"\n".join(raws) + b"\n")


def flip_weights_digest(folder: Path, step: int) -> None:
    """Another committed digest of one step in the journal, under a chain that holds."""

    def edit(event: dict[str, Any]) -> None:
        if event["event"] in ("checkpoint_sealed", "checkpoint_committed") and event["step"] == step:
            digest = event["weights_digest"]
            event["weights_digest"] = ("1" if digest[0] == "0" else "0") + digest[1:]

    edit_journal(folder, edit)


def claim_learning_rate(folder: Path, rate: float) -> None:
    """Let record, manifests, verdicts and journal say that the run was trained with another learning rate."""
    record = json.loads((folder / RECORD_NAME).read_text())
    record["request"]["training"]["learning_rate"] = rate
    text = json.dumps(record, indent=2)
    (folder / RECORD_NAME).write_text(text)
    (folder / SEAL_NAME).write_text(seal(text))
    renamed = dict(_sealed_anew(path.parent, rate) for path in folder.glob(f"checkpoints/*/{MANIFEST_NAME}"))

    def edit(event: dict[str, Any]) -> None:
        named = event["verdict"] if event["event"] == "checkpoint_judged" else event
        if named.get("manifest_sha256") in renamed:
            named["manifest_sha256"] = renamed[named["manifest_sha256"]]

    edit_journal(folder, edit)


def _sealed_anew(checkpoint: Path, rate: float) -> tuple[str, str]:
    """(digest of the manifest before, now) of a checkpoint that claims another birth."""
    before = (checkpoint / MANIFEST_NAME).read_bytes()
    manifest = CheckpointManifest.model_validate_json(before)
    after = encode_manifest(manifest.model_copy(update={"birth": {**manifest.birth, "training.learning_rate": rate}}))
    (checkpoint / MANIFEST_NAME).write_bytes(after)
    verdict = json.loads((checkpoint / VERDICT_NAME).read_text())
    (checkpoint / VERDICT_NAME).write_text(json.dumps(verdict | {"manifest_sha256": sha256_hex(after)}))
    return sha256_hex(before), sha256_hex(after)
