"""Reads what lies in a run folder's checkpoints: steps, manifests, verdicts, pins. Changes nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

from mem_core.domain.checkpoint import (
    ASIDE_NAME,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    VERDICT_NAME,
    CheckpointInfo,
    CheckpointManifest,
    CheckpointVerdict,
    checkpoint_name,
    parse_checkpoint_name,
)
from mem_core.infrastructure.storage.disk import Disk
from mem_core.runtime.checkpoint_manager.inspection.file_checks import ManifestOnDisk, read_manifest
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged, decode_verdict, sha256_hex

_MAX_VERDICT_BYTES = 1 << 20


class Catalog:
    """One run's checkpoints on a disk. Nothing is cached: what it says is what is there."""

    def __init__(self, disk: Disk, run_folder: Path, run_id: str, key: bytes | None = None) -> None:
        self._disk = disk
        self._run_id = run_id
        self._key = key
        self.folder = run_folder / "checkpoints"
        self.pins = run_folder / "pins"
        self.quarantine = run_folder / "quarantine"

    def path(self, step: int) -> Path:
        """Folder of a step, whether it is there or not."""
        return self.folder / checkpoint_name(step)

    def steps(self) -> tuple[int, ...]:
        """Steps that have a folder, ascending by number. Links and files of that name are not folders."""
        if self._disk.kind(self.folder) != "folder":
            return ()
        names = [entry.name for entry in self._disk.entries(self.folder) if entry.kind == "folder"]
        return tuple(sorted(step for name in names if (step := parse_checkpoint_name(name)) is not None and checkpoint_name(step) == name))

    def strangers(self) -> tuple[str, ...]:
        """Folders and links among the checkpoints that are none: nothing here ever looks at them."""
        if self._disk.kind(self.folder) != "folder":
            return ()
        known = {checkpoint_name(step) for step in self.steps()}
        return tuple(entry.name for entry in self._disk.entries(self.folder) if entry.kind != "file" and entry.name not in known)

    def read(self, step: int) -> ManifestOnDisk:
        """See `read_manifest`."""
        return read_manifest(self._disk, self.path(step), self._key)

    def was_complete(self, step: int) -> bool:
        """Whether a folder without a manifest bears traces of one that had it."""
        names = {entry.name for entry in self._disk.entries(self.path(step))}
        return bool(names & {VERDICT_NAME, SIGNATURE_NAME})

    def raw_digest(self, step: int) -> str:
        """SHA-256 of the manifest file as it is, or "" if there is none."""
        try:
            return sha256_hex(self._disk.read(self.path(step) / MANIFEST_NAME))
        except OSError:
            return ""

    def verdict(self, step: int, manifest_sha256: str) -> CheckpointVerdict | None:
        """The verdict that is bound to this manifest, or None."""
        entry = next((item for item in self._disk.entries(self.path(step)) if item.name == VERDICT_NAME), None)
        if entry is None or entry.kind != "file" or entry.size_bytes > _MAX_VERDICT_BYTES:
            return None
        try:
            return decode_verdict(self._disk.read(self.path(step) / VERDICT_NAME), manifest_sha256)
        except OSError:
            return None

    def complete(self) -> Iterator[tuple[int, ManifestOnDisk]]:
        """(step, manifest) of every folder whose manifest can be believed, ascending, whosever it is."""
        for step in self.steps():
            try:
                yield step, self.read(step)
            except (FileNotFoundError, ManifestDamaged):
                continue

    def own(self) -> dict[int, tuple[CheckpointManifest, CheckpointVerdict | None]]:
        """Complete checkpoints of this very run, ascending: manifest and bound verdict. Damaged and foreign ones are left out."""
        found: dict[int, tuple[CheckpointManifest, CheckpointVerdict | None]] = {}
        for step, present in self.complete():
            if present.manifest.run_id == self._run_id and present.manifest.step == step:
                found[step] = (present.manifest, self.verdict(step, present.sha256))
        return found

    def pinned(self) -> frozenset[int]:
        """Steps that a person pinned."""
        if self._disk.kind(self.pins) != "folder":
            return frozenset()
        steps = (parse_checkpoint_name(entry.name) for entry in self._disk.entries(self.pins))
        return frozenset(step for step in steps if step is not None)

    def listing(self) -> tuple[CheckpointInfo, ...]:
        """Every checkpoint and quarantined one, ascending by step."""
        pinned = self.pinned()
        found = [self._info(step, step in pinned) for step in self.steps()]
        if self._disk.kind(self.quarantine) == "folder":
            for entry in self._disk.entries(self.quarantine):
                step = parse_checkpoint_name(entry.name.split("-", 2)[-1])
                if step is not None:
                    reasons = self._quarantine_reasons(self.quarantine / entry.name)
                    found.append(CheckpointInfo(step=step, state="quarantined", folder=str(self.quarantine / entry.name), reasons=reasons))
        return tuple(sorted(found, key=lambda info: (info.step, info.state, info.folder)))

    def _info(self, step: int, pinned: bool) -> CheckpointInfo:
        folder = str(self.path(step))
        try:
            present = self.read(step)
        except FileNotFoundError:
            return CheckpointInfo(step=step, state="incomplete", folder=folder, reasons=("no manifest",), pinned=pinned)
        except ManifestDamaged as exc:
            return CheckpointInfo(step=step, state="invalid", folder=folder, reasons=(f"manifest: {exc}",), pinned=pinned)
        manifest = present.manifest
        verdict = self.verdict(step, present.sha256)
        reasons = verdict.reasons if verdict else ("no verdict yet",)
        if manifest.run_id != self._run_id:
            reasons = (f"belongs to run {manifest.run_id}",)
        valid = verdict is not None and verdict.valid and manifest.run_id == self._run_id and manifest.step == step
        return CheckpointInfo(
            step=step,
            state="valid" if valid else "unvalidated" if verdict is None else "invalid",
            folder=folder,
            reasons=reasons,
            size_bytes=sum(entry.size_bytes for entry in manifest.files),
            attempt=manifest.attempt,
            weights_digest=manifest.weights_digest,
            created_unix_s=manifest.created_unix_s,
            pinned=pinned,
        )

    def _quarantine_reasons(self, folder: Path) -> tuple[str, ...]:
        """Why it lies there. One that is whole carries its reasons beside the verdict that it came with."""
        try:
            if self._disk.kind(folder / ASIDE_NAME) == "file":
                return tuple(str(reason) for reason in json.loads(self._disk.read(folder / ASIDE_NAME))["reasons"])
            return CheckpointVerdict.model_validate_json(self._disk.read(folder / VERDICT_NAME)).reasons
        except (OSError, ValueError, KeyError, TypeError):
            return ()
