"""Manifest and verdict as bytes: one canonical form, so that any flipped bit of a manifest is found, and an optional signature."""

import hashlib
import hmac
import json
from typing import Any

from pydantic import ValidationError

from mem_core.domain.checkpoint import CheckpointManifest, CheckpointVerdict
from mem_core.domain.errors import InternalError
from mem_core.domain.secrets import clean_text

MAX_MANIFEST_BYTES = 64 << 20
_SIGNATURE_ALGORITHM = "hmac-sha256"


class ManifestDamaged(Exception):
    """The bytes are not a manifest that MEM wrote. `str()` is the reason for people."""


class SignatureRefused(ManifestDamaged):
    """The manifest does not bear the signature of the key in use: damaged, foreign, or simply another key. Never a reason to quarantine."""


class ManifestUnreadable(SignatureRefused):
    """What it says cannot be seen now or by this user. As with another's signature: left where it lies, and an older one is tried."""


class ForeignCheckpoint(ManifestDamaged):
    """A manifest that is whole and not this run's. Kept apart from damage: it is somebody's work."""


def sha256_hex(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Canonical bytes, with the manifest's own digest filled in.

    Raises:
        InternalError: `extra` or another field holds something that plain JSON cannot say (a NaN, an object).
    """
    try:
        body = manifest.model_copy(update={"manifest_sha256": ""}).model_dump(mode="json")
        body["manifest_sha256"] = sha256_hex(_canonical(body))
        return _canonical(body)
    except ValueError as exc:
        raise InternalError(
            f"the manifest of step {manifest.step} cannot be written as plain JSON ({exc})",
            field="manifest.extra",
            remedy="Keep only finite numbers, text, lists and dictionaries in it.",
        ) from exc


def decode_manifest(data: bytes) -> CheckpointManifest:
    """The manifest, if these are exactly the bytes that `encode_manifest` makes and its own digest holds.

    Raises:
        ManifestDamaged: with the reason.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestDamaged(f"{len(data)} bytes is too long for a manifest")
    try:
        body: Any = json.loads(data)
        manifest = CheckpointManifest.model_validate_json(data)
    except ValidationError as exc:
        problems = "; ".join(f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in exc.errors()[:3])
        raise ManifestDamaged(clean_text(f"not a valid manifest ({problems})")) from exc
    except (ValueError, RecursionError) as exc:
        raise ManifestDamaged(f"not readable as JSON ({type(exc).__name__})") from exc
    claimed = body.get("manifest_sha256")
    body["manifest_sha256"] = ""
    if claimed != sha256_hex(_canonical(body)):
        raise ManifestDamaged("the manifest's own digest does not match")
    body["manifest_sha256"] = claimed
    if _canonical(body) != data:
        raise ManifestDamaged("the manifest is not in canonical form")
    return manifest


def encode_verdict(verdict: CheckpointVerdict) -> bytes:
    """Verdict as JSON bytes."""
    return verdict.model_dump_json(indent=1).encode()


def decode_verdict(data: bytes, manifest_sha256: str) -> CheckpointVerdict | None:
    """The verdict, or None if it is unreadable or was given about another manifest: a void verdict is no verdict."""
    try:
        verdict = CheckpointVerdict.model_validate_json(data)
    except ValueError:
        return None
    return verdict if verdict.manifest_sha256 == manifest_sha256 else None


def sign(manifest_bytes: bytes, key: bytes) -> bytes:
    """Content of the signature file: HMAC-SHA256 of the manifest's bytes."""
    code = hmac.new(key, manifest_bytes, hashlib.sha256).hexdigest()
    return _canonical({"algorithm": _SIGNATURE_ALGORITHM, "hmac": code})


def signature_holds(manifest_bytes: bytes, signature: bytes | None, key: bytes) -> bool:
    """Whether the signature file's content is right; compared in constant time."""
    return signature is not None and hmac.compare_digest(signature, sign(manifest_bytes, key))


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
