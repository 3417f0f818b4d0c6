"""Judges one checkpoint folder: a pure function of the folder and its manifest, made to run in a process of its own."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mem_core.domain.checkpoint import MANIFEST_NAME, CheckpointManifest, CheckpointVerdict
from mem_core.domain.errors import InternalError
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.inspection.file_checks import check_claims, check_files, read_manifest
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged, sha256_hex
from mem_core.runtime.checkpoint_manager.inspection.pickle_scan import DEFAULT_ALLOWED_GLOBALS
from mem_core.runtime.checkpoint_manager.inspection.tensor_checks import TensorFindings, check_tensors

Level = Literal["integrity", "replay"]
Validator = Callable[[Path, CheckpointManifest, str, Level], CheckpointVerdict]
"""(folder, manifest as the caller read it, weights digest of the checkpoint before or "", level) -> verdict."""
Replay = Callable[[Path, CheckpointManifest], tuple[str, ...]]
"""Restores the folder in a fresh process and redoes the recorded next steps; returns reasons, empty if they came out the same."""


@dataclass(frozen=True)
class IntegrityValidator:
    """`Validator` at level integrity, and at level replay if `replay` is wired. Can be pickled, so that any process may run it."""

    allowed_globals: frozenset[str] = DEFAULT_ALLOWED_GLOBALS
    signature_key: bytes | None = field(default=None, repr=False)
    replay: Replay | None = None

    def __call__(self, folder: Path, manifest: CheckpointManifest, previous_weights_digest: str, level: Level) -> CheckpointVerdict:
        """Judge, cheapest checks first: bytes, then safety, then content, then a replay. Reads only; nothing of the checkpoint is run.

        Raises:
            InternalError: level replay without a wired replay.
            OSError: the folder cannot be read for a reason that says nothing about the checkpoint.
        """
        if level == "replay" and self.replay is None:
            raise InternalError("no replay is wired", field="checkpoint.validation", value=level, remedy="Report this as a bug.")
        started_s = time.perf_counter()
        findings, manifest_sha256 = self._judge(folder, manifest, previous_weights_digest)
        if level == "replay" and not findings.reasons and self.replay is not None:
            for reason in self.replay(folder, manifest):
                findings.damaged(f"replay: {reason}")
        return CheckpointVerdict(
            step=manifest.step,
            level=level,
            valid=not findings.reasons,
            reasons=tuple(findings.reasons),
            weights_bad=findings.weights_bad,
            manifest_sha256=manifest_sha256,
            weights_digest=manifest.weights_digest,
            duration_s=time.perf_counter() - started_s,
            judged_unix_s=time.time(),
        )

    def _judge(self, folder: Path, manifest: CheckpointManifest, previous_weights_digest: str) -> tuple[TensorFindings, str]:
        findings = TensorFindings()
        disk = OsDisk()
        try:
            present = read_manifest(disk, folder, self.signature_key)
        except (ManifestDamaged, FileNotFoundError) as exc:
            findings.damaged(f"manifest: {exc}")
            return findings, ""
        if present.manifest != manifest:
            findings.damaged("manifest: it changed while the checkpoint was judged")
        findings.reasons += [*check_claims(manifest, manifest.step), *check_files(disk, folder, manifest)]
        if not findings.reasons:
            inside = check_tensors(folder, manifest, self.allowed_globals)
            findings.reasons += inside.reasons
            findings.weights_bad = inside.weights_bad
        if findings.reasons and not (folder / MANIFEST_NAME).exists():
            raise FileNotFoundError(f"{folder} went away while it was judged")  # that says nothing about the checkpoint
        if not findings.reasons and manifest.weights_digest and manifest.weights_digest == previous_weights_digest:
            findings.not_finite("weights did not change since the checkpoint before")
        return findings, sha256_hex(present.data)
