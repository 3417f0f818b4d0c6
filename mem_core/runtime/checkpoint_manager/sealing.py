"""Turns what the ranks staged into a sealed checkpoint: synced, hashed, with its manifest. Nothing is visible yet."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mem_core.domain.checkpoint import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    VERDICT_NAME,
    CheckpointDraft,
    CheckpointExpectation,
    CheckpointManifest,
    FileEntry,
)
from mem_core.domain.errors import InternalError
from mem_core.infrastructure.storage.disk import Disk, walk_files, walk_folders
from mem_core.runtime.checkpoint_manager.inspection.file_checks import ManifestOnDisk, check_claims, check_files, read_manifest
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged, decode_manifest, encode_manifest, sign
from mem_core.runtime.checkpoint_manager.inspection.shards import missing_shards


@dataclass(frozen=True)
class Sealer:
    """Seals staged folders of one attempt of one run."""

    disk: Disk
    run_id: str
    attempt: int
    expectation: CheckpointExpectation
    birth: Mapping[str, Any]
    signature_key: bytes | None = None
    clock: Callable[[], float] = time.time

    def seal(self, step: int, staging: Path, draft: CheckpointDraft) -> ManifestOnDisk:
        """fsync files, hash them, write and fsync the manifest, fsync folders. May be done again after a failure.

        Returns the manifest as a reader will see it, with its bytes.

        Raises:
            InternalError: a rank's file is missing, something is no plain file, or the draft is of another step.
        """
        if draft.position.applied_steps != step:
            raise InternalError(f"commit of step {step} was given position {draft.position.applied_steps}", remedy="Report this as a bug.")
        names = self._staged_names(step, staging)
        for name in names:
            self.disk.sync_file(staging / name)
        data = encode_manifest(self._manifest(step, tuple(self._entry(staging, name) for name in names), draft))
        self._write(staging / MANIFEST_NAME, data)
        if self.signature_key is not None:
            self._write(staging / SIGNATURE_NAME, sign(data, self.signature_key))
        for folder in walk_folders(self.disk, staging):
            self.disk.sync_folder(folder)
        return ManifestOnDisk(decode_manifest(data), data)

    def prove_again(self, step: int, staging: Path) -> ManifestOnDisk:
        """Check a staged folder that brought its manifest along, then sync all of it.

        Raises:
            ManifestDamaged: it is not, byte for byte, the checkpoint of that step of this run.
        """
        try:
            present = read_manifest(self.disk, staging, self.signature_key)
        except FileNotFoundError as exc:
            raise ManifestDamaged("it has no manifest") from exc
        reasons = (*check_claims(present.manifest, step, self.run_id), *check_files(self.disk, staging, present.manifest))
        if reasons:
            raise ManifestDamaged("; ".join(reasons))
        for name, _ in walk_files(self.disk, staging):
            self.disk.sync_file(staging / name)
        for folder in walk_folders(self.disk, staging):
            self.disk.sync_folder(folder)
        return present

    def _staged_names(self, step: int, staging: Path) -> list[str]:
        leftovers = (MANIFEST_NAME, SIGNATURE_NAME)  # of a commit that failed after this point
        files = [(name, entry) for name, entry in walk_files(self.disk, staging) if name not in leftovers]
        names = [name for name, _ in files]
        odd = [name for name, entry in files if entry.kind != "file" or name == VERDICT_NAME]
        missing = missing_shards(names, self.expectation.num_ranks, self.expectation.zero_stage)
        if odd or missing:
            raise InternalError(
                f"the staged checkpoint of step {step} lacks {list(missing)} and holds {odd} that do not belong",
                remedy="Every rank must have saved before commit; see the workers' logs.",
            )
        return names

    def _entry(self, staging: Path, name: str) -> FileEntry:
        size_bytes, sha256 = self.disk.digest(staging / name)
        return FileEntry(path=name, size_bytes=size_bytes, sha256=sha256)

    def _manifest(self, step: int, files: tuple[FileEntry, ...], draft: CheckpointDraft) -> CheckpointManifest:
        fields = {name: getattr(draft, name) for name in CheckpointDraft.model_fields}
        fields["parameters"] = draft.parameters or self.expectation.parameters
        return CheckpointManifest(
            run_id=self.run_id,
            attempt=self.attempt,
            step=step,
            num_ranks=self.expectation.num_ranks,
            zero_stage=self.expectation.zero_stage,
            files=files,
            created_unix_s=self.clock(),
            birth=dict(self.birth),
            **fields,
        )

    def _write(self, path: Path, data: bytes) -> None:
        self.disk.write(path, data)
        self.disk.sync_file(path)
