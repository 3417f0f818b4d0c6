"""Where things lie in a remote store, and who may be believed there. No rename exists, so names and create-only objects do the fencing.

    <run_id>/checkpoints/step-000000010/attempt-3-1a2b3c4d/<engine files>, signature.json, manifest.json (last, create-only)
    <run_id>/attempts/attempt-000003.json   create-only: this attempt began; which manifests it saw then
    <run_id>/marks/step-000000010.attempt-3-1a2b3c4d.json   to be deleted, since when, by whom

A manifest of an older attempt that is not among those that a newer attempt saw when it began was published by a writer that had been
shut out, perhaps stopped between its check and its write: readers ignore it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mem_core.domain.checkpoint import MANIFEST_NAME, checkpoint_name, parse_checkpoint_name
from mem_core.infrastructure.storage.port import ObjectStat
from mem_core.infrastructure.storage.reading import parse_json

_UPLOAD = re.compile(r"^attempt-(\d+)-([0-9a-f]{8})$")
_ATTEMPT = re.compile(r"^attempt-(\d{6,})\.json$")


@dataclass(frozen=True, order=True, slots=True)
class Upload:
    """One upload of one checkpoint. Ordered by step, then attempt: the greatest is the newest."""

    step: int
    attempt: int
    digest8: str

    @property
    def name(self) -> str:
        """`step-000000010/attempt-3-1a2b3c4d`."""
        return f"{checkpoint_name(self.step)}/attempt-{self.attempt}-{self.digest8}"


@dataclass(frozen=True)
class RemoteRun:
    """The keys of one run, listed once, sorted into what they mean."""

    complete: tuple[Upload, ...]
    incomplete: tuple[Upload, ...]
    keys: Mapping[Upload, tuple[str, ...]]
    attempts: tuple[int, ...]
    marks: tuple[Upload, ...]
    size_bytes: int


def upload_prefix(run_id: str, upload: Upload) -> str:
    """Folder of an upload's objects."""
    return f"{run_id}/checkpoints/{upload.name}"


def manifest_key(run_id: str, upload: Upload) -> str:
    """Key of the object that completes an upload."""
    return f"{upload_prefix(run_id, upload)}/{MANIFEST_NAME}"


def attempt_key(run_id: str, attempt: int) -> str:
    """Key of the record that an attempt began."""
    return f"{run_id}/attempts/attempt-{attempt:06d}.json"


def mark_key(run_id: str, upload: Upload) -> str:
    """Key of the mark that an upload is to be deleted."""
    return f"{run_id}/marks/{upload.name.replace('/', '.')}.json"


def sort_keys(run_id: str, objects: Iterable[ObjectStat]) -> RemoteRun:
    """What a run's objects are. Unknown keys are left alone."""
    keys: dict[Upload, list[str]] = {}
    attempts: list[int] = []
    marks: list[Upload] = []
    size_bytes = 0
    for item in objects:
        size_bytes += item.size_bytes
        parts = item.key.removeprefix(f"{run_id}/").split("/")
        upload = _parse(parts[1], parts[2]) if parts[0] == "checkpoints" and len(parts) > 3 else None
        if upload is not None:
            keys.setdefault(upload, []).append(item.key)
        elif parts[0] == "attempts" and len(parts) == 2 and (match := _ATTEMPT.match(parts[1])):
            attempts.append(int(match.group(1)))
        elif parts[0] == "marks" and len(parts) == 2:
            marked = _parse(*parts[1].removesuffix(".json").split(".", 1)) if parts[1].count(".") == 2 else None
            marks += [marked] if marked is not None else []
    complete = {upload for upload, names in keys.items() if manifest_key(run_id, upload) in names}
    return RemoteRun(
        complete=tuple(sorted(complete)),
        incomplete=tuple(sorted(keys.keys() - complete)),
        keys={upload: tuple(names) for upload, names in keys.items()},
        attempts=tuple(sorted(attempts)),
        marks=tuple(sorted(marks)),
        size_bytes=size_bytes,
    )


def attempt_of(run_id: str, key: str) -> int:
    """Which attempt an object of an upload belongs to; 0 for any other key."""
    return max((upload.attempt for upload in sort_keys(run_id, (ObjectStat(key, 0),)).keys), default=0)


def believable(run: RemoteRun, seen: frozenset[str]) -> tuple[Upload, ...]:
    """Complete uploads that were not published by an attempt that had been shut out; ascending.

    `seen`: names of the uploads that the newest attempt believed when it began; what older attempts added later is not among them. The
    newest record is enough, since each attempt believes only what the one before it did.
    """
    newest = run.attempts[-1] if run.attempts else 0
    return tuple(upload for upload in run.complete if upload.attempt >= newest or upload.name in seen)


def encode_baseline(attempt: int, uploads: Iterable[Upload], now_unix_s: float, owner: str) -> bytes:
    """Record of an attempt's beginning. `owner` is unique, so that two beginners of one number never both win."""
    body = {"attempt": attempt, "began_unix_s": now_unix_s, "owner": owner, "seen": sorted(upload.name for upload in uploads)}
    return json.dumps(body, sort_keys=True).encode()


def decode_baseline(data: bytes) -> frozenset[str]:
    """Names of the uploads that an attempt believed when it began. Raises ValueError if the record is damaged."""
    try:
        return frozenset(str(name) for name in parse_json(data)["seen"])
    except (KeyError, TypeError) as exc:
        raise ValueError("not a record of an attempt") from exc


def is_record_of(data: bytes, owner: str) -> bool:
    """Whether this record of an attempt was written by this owner."""
    try:
        return parse_json(data).get("owner") == owner
    except (ValueError, AttributeError):
        return False


def _parse(step_name: str, upload_name: str) -> Upload | None:
    step, match = parse_checkpoint_name(step_name), _UPLOAD.match(upload_name)
    return Upload(step, int(match.group(1)), match.group(2)) if step is not None and match else None
