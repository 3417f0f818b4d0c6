"""The part of integrity that needs no torch: manifest, signature, names, sizes, SHA-256, shards."""

from dataclasses import dataclass
from pathlib import Path

from mem_core.domain.checkpoint import MANIFEST_NAME, OWN_NAMES, SIGNATURE_NAME, CheckpointManifest
from mem_core.infrastructure.storage.disk import Disk, walk_files
from mem_core.infrastructure.storage.reading import why
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import (
    MAX_MANIFEST_BYTES,
    ManifestDamaged,
    ManifestUnreadable,
    SignatureRefused,
    decode_manifest,
    sha256_hex,
    signature_holds,
)
from mem_core.runtime.checkpoint_manager.inspection.shards import missing_shards, surplus_shards

MAX_REASONS = 20


@dataclass(frozen=True, slots=True)
class ManifestOnDisk:
    """A manifest and the exact bytes that it was read from."""

    manifest: CheckpointManifest
    data: bytes

    @property
    def sha256(self) -> str:
        """Digest of those bytes: what verdicts and journal lines name a manifest by."""
        return sha256_hex(self.data)


def read_manifest(disk: Disk, folder: Path, key: bytes | None = None) -> ManifestOnDisk:
    """Read and prove a manifest; with a key also its signature.

    Raises:
        FileNotFoundError: the folder has no manifest: it was never completed.
        ManifestDamaged: there is one, and it is not what MEM wrote. ManifestUnreadable: nothing can be said about it.
    """
    try:
        return _read_manifest(disk, folder, key)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise ManifestUnreadable(f"it cannot be read ({why(exc)})") from exc


def _read_manifest(disk: Disk, folder: Path, key: bytes | None) -> ManifestOnDisk:
    path = folder / MANIFEST_NAME
    sizes = {entry.name: entry for entry in disk.entries(folder)}
    entry = sizes.get(MANIFEST_NAME)
    if entry is None:
        raise FileNotFoundError(path)
    if entry.kind != "file" or entry.size_bytes > MAX_MANIFEST_BYTES:
        raise ManifestDamaged("the manifest is not a plain file of a sane size")
    data = disk.read(path)
    if key is not None:
        signature = sizes.get(SIGNATURE_NAME)
        text = disk.read(folder / SIGNATURE_NAME) if signature and signature.kind == "file" and signature.size_bytes < 4096 else None
        if not signature_holds(data, text, key):
            raise SignatureRefused("the signature is missing or does not match MEM_MANIFEST_KEY")
    return ManifestOnDisk(decode_manifest(data), data)


def check_files(disk: Disk, folder: Path, manifest: CheckpointManifest) -> tuple[str, ...]:
    """Reasons why the files are not those of the manifest; empty if they are. Reads every byte once; follows no link."""
    found = {name: entry for name, entry in walk_files(disk, folder) if name not in OWN_NAMES}
    wanted = {entry.path: entry for entry in manifest.files}
    reasons = [f"{name}: not in the manifest" for name in sorted(found.keys() - wanted.keys())]
    reasons += [f"{name}: missing" for name in sorted(wanted.keys() - found.keys())]
    reasons += [f"{name}: rank's file missing" for name in missing_shards(wanted.keys(), manifest.num_ranks, manifest.zero_stage)]
    reasons += [f"{name}: belongs to no rank" for name in surplus_shards(wanted.keys(), manifest.num_ranks, manifest.zero_stage)]
    for name in sorted(found.keys() & wanted.keys()):
        if len(reasons) >= MAX_REASONS:
            break
        entry, expected = found[name], wanted[name]
        if entry.kind != "file":
            reasons.append(f"{name}: not a plain file")
        elif entry.size_bytes != expected.size_bytes:
            reasons.append(f"{name}: {entry.size_bytes} bytes, the manifest says {expected.size_bytes}")
        elif disk.digest(folder / name) != (expected.size_bytes, expected.sha256):
            reasons.append(f"{name}: SHA-256 differs")
    return tuple(reasons[:MAX_REASONS])


def check_claims(manifest: CheckpointManifest, step: int, run_id: str | None = None) -> tuple[str, ...]:
    """Reasons why a manifest does not belong where it lies."""
    reasons: list[str] = []
    if manifest.step != step:
        reasons.append(f"manifest is of step {manifest.step}, the folder of step {step}")
    if manifest.position.applied_steps != manifest.step:
        reasons.append(f"position says {manifest.position.applied_steps} applied steps, the manifest {manifest.step}")
    if run_id is not None and manifest.run_id != run_id:
        reasons.append(f"manifest belongs to run {manifest.run_id}, not {run_id}")
    return tuple(reasons)
