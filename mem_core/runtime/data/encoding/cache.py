"""The cache of prepared data: fingerprints, remembered file hashes, folders that are either whole or not there.

A folder `<cache>/<fingerprint>` appears by one rename of a finished, synced temporary folder. A temporary folder is locked by
the process that fills it (`flock`, which the kernel drops at death), so that leftovers of dead processes are told from live ones.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_json, read_regular
from mem_core.runtime.data.reading.sources import SourceFile
from mem_core.runtime.data.serving.dataset import check_contents, check_folder
from mem_core.runtime.data.values import PreparedData

FORMAT_VERSION = 1
_RESULT_NAME = "data.json"
_HASHES_NAME = "file-hashes.json"
_MOST_HASHES = 100_000
_STAGING_PREFIX = ".preparing-"
# A file changed within one tick of the clock after it was hashed carries the same time stamp: such hashes are not trusted.
_SETTLED_NS = 50_000_000
_MATTERS = (
    "text_field", "messages_field", "prompt_field", "completion_field", "sequence_length", "long_documents", "packing",
)  # fmt: skip


def fingerprint(
    data: DataSection, train: Sequence[tuple[SourceFile, str]], validation: Sequence[tuple[SourceFile, str]], tokenizer: str
) -> str:
    """SHA-256 over all that decides the rows: contents in order, the settings that matter, the tokenizer, the format version.

    Where the files lie, and what happens to bad rows, does not matter: rows that are there are the same rows.
    """
    described = {
        "format": FORMAT_VERSION,
        "train": [[file.kind, file.size_bytes, digest] for file, digest in train],
        "validation": [[file.kind, file.size_bytes, digest] for file, digest in validation],
        "held_out": data.validation if isinstance(data.validation, float) else None,
        "settings": {name: getattr(data, name) for name in _MATTERS},
        "tokenizer": tokenizer,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class HashCache:
    """Remembers content hashes by path and stamp, so that unchanged files are not read again. Losing it costs time only."""

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / _HASHES_NAME
        self._entries = self._load()

    def _load(self) -> dict[str, list[Any]]:
        try:
            loaded = read_json(self._path)
        except (OSError, ValueError):
            return {}
        return cast(dict[str, list[Any]], loaded) if isinstance(loaded, dict) else {}

    def get(self, file: SourceFile) -> str | None:
        """The hash of the file's content, or None when it has to be read."""
        entry = self._entries.get(file.path)
        return str(entry[1]) if entry is not None and file.stamp and entry[0] == file.stamp else None

    def remember(self, hashed: Iterable[tuple[SourceFile, str, int]]) -> None:
        """Store (file, hash, nanoseconds when reading began), merged with what others have stored meanwhile."""
        fresh = {
            file.path: [file.stamp, digest]
            for file, digest, began_ns in hashed
            if file.stamp and began_ns - file.modified_unix_ns > _SETTLED_NS
        }
        self._entries = {**self._load(), **fresh}
        kept = dict(list(self._entries.items())[-_MOST_HASHES:])
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix=".hashes-", delete=False) as file:
            json.dump(kept, file)
        os.replace(file.name, self._path)


def load_prepared(cache_dir: Path, name: str) -> PreparedData | None:
    """The prepared data of a fingerprint when it is there and whole; a damaged folder is removed and counts as absent."""
    folder = cache_dir / name
    try:
        prepared = PreparedData.model_validate_json(read_regular(folder / _RESULT_NAME, RECORD_LIMIT_BYTES))
        validation = folder / "validation" if prepared.num_validation_samples else None
        for part in (folder / "train", validation):
            if part is not None:
                check_contents(part, check_folder(part))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, DataError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    where = {"train_dir": str(folder / "train"), "validation_dir": None if validation is None else str(validation)}
    return prepared.model_copy(update={**where, "from_cache": True})


@contextmanager
def staging_folder(cache_dir: Path) -> Iterator[Path]:
    """A locked temporary folder that is gone afterwards; leftovers of dead processes are removed on the way."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / ".lock").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        _sweep(cache_dir)
        folder = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=cache_dir))
        holder = (folder / ".lock").open("w")
        fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        holder.close()


def _sweep(cache_dir: Path) -> None:
    for folder in cache_dir.glob(f"{_STAGING_PREFIX}*"):
        with suppress(OSError), (folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    for hashes in cache_dir.glob(".hashes-*"):
        with suppress(OSError):
            if time.time() - hashes.stat().st_mtime > 3_600:
                hashes.unlink()


def publish(folder: Path, cache_dir: Path, prepared: PreparedData) -> None:
    """Make a finished folder visible under its fingerprint in one step. If another process was first, its folder stays."""
    with (folder / _RESULT_NAME).open("wb") as file:
        file.write(prepared.model_dump_json().encode())
        file.flush()
        os.fsync(file.fileno())
    target = cache_dir / prepared.fingerprint
    for part in (folder / "train", folder / "validation", folder):
        if part.is_dir():
            _sync_folder(part)
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    _sync_folder(cache_dir)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
