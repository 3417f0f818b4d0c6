"""What is special about S3: part sizes, ETags, client settings."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mem_core.infrastructure.storage.reading import open_regular

_MIB = 1 << 20
MIN_PART_BYTES = 8 * _MIB
MAX_PARTS = 9_000
_ETAG = re.compile(r"^[0-9a-f]{32}(-\d+)?$")


def part_size_bytes(size_bytes: int) -> int:
    """Part size for an object: 8 MiB, more where it would need over 9,000 parts (S3 takes 10,000), in whole MiB."""
    needed = -(-size_bytes // MAX_PARTS)
    return max(MIN_PART_BYTES, -(-needed // _MIB) * _MIB)


def is_etag(text: str) -> bool:
    """Whether an ETag has the form of a digest (encrypted buckets and other stores answer anything)."""
    return _ETAG.match(text) is not None


def etag_of_file(path: Path, part_bytes: int) -> str:
    """The ETag that S3 gives: MD5 of a single put, MD5 of the parts' MD5s and their number otherwise.

    s3fs puts a file below two parts in one go.
    """
    size_bytes = path.stat().st_size
    step = part_bytes if size_bytes >= 2 * part_bytes else max(size_bytes, 1)
    parts: list[bytes] = []
    with open_regular(path) as file:
        for start in range(0, max(size_bytes, 1), step):
            digest, left = hashlib.md5(usedforsecurity=False), min(step, size_bytes - start)
            while left > 0 and (chunk := file.read(min(left, _MIB))):
                digest.update(chunk)
                left -= len(chunk)
            parts.append(digest.digest())
    if size_bytes < 2 * part_bytes:
        return parts[0].hex()
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """s3fs options with time limits; the caller's own values win.

    One try only: a hidden retry of a create-only put whose reply was lost would look as if another writer had won.
    """
    merged = dict(options)
    config = {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1, "mode": "standard"}}
    merged["config_kwargs"] = {**config, **dict(options.get("config_kwargs") or {})}
    return merged
