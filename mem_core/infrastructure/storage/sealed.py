"""Small cached files that prove themselves: their text with its own SHA-256, so that one flipped bit is seen before it is believed."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from mem_core.infrastructure.storage.reading import read_regular


def sealed(text: str) -> str:
    """`text` with its own digest."""
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text})


def read_sealed(path: Path, limit_bytes: int) -> str | None:
    """The text of a file that `sealed` gave the content of; None where it is missing, no file, too large or not what was written."""
    try:
        return unsealed(read_regular(path, limit_bytes))
    except OSError:
        return None


def unsealed(raw: bytes) -> str | None:
    """The text, where its digest holds."""
    try:
        content = json.loads(raw)
        text, digest = content["text"], content["sha256"]
        return str(text) if hashlib.sha256(text.encode()).hexdigest() == digest else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def remove_whatever(path: Path) -> None:
    """Take away what stands at a place that belongs to a cache: a file, a link, a pipe or a whole folder. Never raises."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        return
