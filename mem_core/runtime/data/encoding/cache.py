"""The cache of prepared data: fingerprints, remembered file hashes, folders that are either whole or not there.

A folder `<cache>/<fingerprint>` appears by one rename of a finished, synced temporary folder (`marks.staging`).
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.domain.secrets import unsigned
from mem_core.infrastructure.storage.reading import read_regular
from mem_core.infrastructure.storage.sealed import read_sealed, remove_whatever, sealed, unsealed
from mem_core.runtime.data.reading.sources import SourceFile
from mem_core.runtime.data.serving.dataset import check_contents, check_folder
from mem_core.runtime.data.serving.shards import INDEX_NAME, TokenIndex, file_digest
from mem_core.runtime.data.values import PreparedData
from mem_core.runtime.models.encoding import Encoding, architecture_identity, encoding_of
from mem_core.runtime.models.folders import is_preset, tokenizer_identity

FORMAT_VERSION = 1
_RESULT_NAME = "data.json"
_HASHES_NAME = "file-hashes.json"
_MOST_HASHES = 100_000
_MOST_HASHES_BYTES = 2**28
_MOST_RESULT_BYTES = 2**26
# A file changed within one tick of the clock after it was hashed carries the same time stamp: such hashes are not trusted.
_SETTLED_NS = 50_000_000
# Settings that decide the rows, by the first rules that had them.
_MATTERS = {
    1: ("text_field", "messages_field", "prompt_field", "completion_field", "sequence_length", "long_documents", "packing"),
    3: ("assistant_only", "completion_only", "document_attention"),
    4: ("context_field",),
}


def fingerprint(
    data: DataSection, train: Sequence[tuple[SourceFile, str]], validation: Sequence[tuple[SourceFile, str]], source: str, rules: int
) -> str:
    """SHA-256 over all that decides the rows: contents in order, the settings that matter, the encoding, the format version.

    Where the files lie, and what happens to bad rows, does not matter: rows that are there are the same rows. The first rules
    named tokenizer files alone, which is not enough to know ids by; runs that were born under them keep their name.
    """
    described: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "train": [[file.kind, file.size_bytes, digest] for file, digest in train],
        "validation": [[file.kind, file.size_bytes, digest] for file, digest in validation],
        "held_out": data.validation if isinstance(data.validation, float) else None,
        "settings": {name: getattr(data, name) for since, names in _MATTERS.items() if rules >= since for name in names},
        "tokenizer": tokenizer_identity(source) if rules == 1 else encoding_for(data, source, rules),
    }
    if data.is_weighted:
        described["sources"] = [file.source for file, _ in train]  # each is packed by itself; how often it is seen is no matter of rows
    if wants_apart(data, rules) and not is_preset(source):
        described["model"] = architecture_identity(source)  # whether it can keep documents apart
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def asked_for(data: DataSection, train: Sequence[SourceFile], validation: Sequence[SourceFile], source: str, rules: int) -> str:
    """SHA-256 over what a preparation is asked for by name, whatever the files hold: two of one name are not at work at a time."""
    named = [[[unsigned(file.path), file.kind, file.source] for file in files] for files in (train, validation)]
    settings = {name: getattr(data, name) for names in _MATTERS.values() for name in names}
    held_out = data.validation if isinstance(data.validation, float) else None
    return hashlib.sha256(json.dumps([named, settings, held_out, source, rules], sort_keys=True).encode()).hexdigest()


def encoding_for(data: DataSection, source: str, rules: int) -> Encoding:
    """What decides the ids of these rows; a template has a part in it wherever they may be messages."""
    chat = data.messages_field is not None or (rules > 2 and data.prompt_field is not None)
    return encoding_of(source, chat=chat, rules=rules)


def wants_apart(data: DataSection, rules: int) -> bool:
    """Whether documents that share a row are not to see each other. Runs of earlier rules never had that."""
    answered = data.prompt_field is not None or data.messages_field is not None
    asked = data.document_attention == "within" or (data.document_attention == "auto" and answered)
    return rules > 2 and data.packing and asked


class HashCache:
    """Remembers content hashes by path and stamp, so that unchanged files are not read again. Losing it costs time only."""

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / _HASHES_NAME
        self._entries = self._load()

    def _load(self) -> dict[str, list[str]]:
        """Nothing where the file is not what was written: a wrong hash would be taken for changed data."""
        text = read_sealed(self._path, _MOST_HASHES_BYTES)
        return cast(dict[str, list[str]], json.loads(text)) if text is not None else {}

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
        with suppress(OSError):
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix=".hashes-", delete=False) as file:
                file.write(sealed(json.dumps(kept)))
            if self._path.is_dir():
                remove_whatever(self._path)
            os.replace(file.name, self._path)


def load_prepared(cache_dir: Path, name: str, on_bytes: Callable[[int], None] = lambda size_bytes: None) -> PreparedData | None:
    """The prepared data of a fingerprint when it is there and proves itself; whatever else stands there is removed."""
    folder = cache_dir / name
    if not os.path.lexists(folder):
        return None
    try:
        prepared = _proven(folder, name, on_bytes)
    except (OSError, ValueError, DataError):
        remove_whatever(folder)
        return None
    where = {"train_dir": str(folder / "train"), "validation_dir": None}
    if prepared.num_validation_samples:
        where["validation_dir"] = str(folder / "validation")
    return prepared.model_copy(update={**where, "from_cache": True})


def told(cache_dir: Path, name: str) -> PreparedData | None:
    """What the sealed result of a fingerprint says; None where there is none that proves itself."""
    text = read_sealed(cache_dir / name / _RESULT_NAME, _MOST_RESULT_BYTES)
    try:
        prepared = PreparedData.model_validate_json(text or "")
    except ValueError:
        return None
    return prepared if prepared.fingerprint == name else None


def _proven(folder: Path, name: str, on_bytes: Callable[[int], None]) -> PreparedData:
    """Every byte down to the tokens hangs on the sealed result: it holds the digests of the indexes, and they those of the shards.

    Results of older versions have no seal; runs that were born then had better keep their shards, so that theirs are believed where
    every number that two files hold is the same in both.

    Raises:
        OSError, ValueError, DataError: something is missing or is not what was written.
    """
    raw = read_regular(folder / _RESULT_NAME, _MOST_RESULT_BYTES)
    text = unsealed(raw)
    prepared = PreparedData.model_validate_json(raw if text is None else text)
    parts = ("train", "validation") if prepared.num_validation_samples else ("train",)
    indexes = {part: check_folder(folder / part) for part in parts}
    if prepared.fingerprint != name or (text is None and prepared.encoding):
        raise ValueError("not the result that belongs here")
    if text is not None and any(file_digest(folder / part / INDEX_NAME) != prepared.index_sha256.get(part) for part in parts):
        raise ValueError("an index is not the one that was written")
    if text is None and not _agrees(prepared, indexes):
        raise ValueError("result and index do not agree")
    for part, index in indexes.items():
        check_contents(folder / part, index, on_bytes=on_bytes)
    return prepared


def _agrees(prepared: PreparedData, indexes: Mapping[str, TokenIndex]) -> bool:
    train = indexes["train"]
    told = (prepared.num_samples, prepared.num_tokens, prepared.trained_tokens, prepared.longest_tokens, prepared.max_token_id)
    held_out = indexes.get("validation")
    largest = max(train.max_token_id, held_out.max_token_id if held_out is not None else 0)
    rows = held_out.num_rows if held_out is not None else 0
    return told == (train.num_rows, train.num_tokens, train.trained_tokens, train.longest_tokens, largest) and (
        rows == prepared.num_validation_samples
    )


def publish(folder: Path, cache_dir: Path, prepared: PreparedData) -> None:
    """Make a finished folder visible under its fingerprint in one step. If another process was first, its folder stays."""
    digests = {part.name: file_digest(part / INDEX_NAME) for part in (folder / "train", folder / "validation") if part.is_dir()}
    with (folder / _RESULT_NAME).open("wb") as file:
        file.write(sealed(prepared.model_copy(update={"index_sha256": digests}).model_dump_json()).encode())
        file.flush()
        os.fsync(file.fileno())
    target = cache_dir / prepared.fingerprint
    for part in (folder / "train", folder / "validation", folder):
        if part.is_dir():
            _sync_folder(part)
    try:
        folder.rename(target)
    except OSError:
        if load_prepared(cache_dir, prepared.fingerprint) is None:  # what stood there proved nothing and is gone now
            folder.rename(target)
    _sync_folder(cache_dir)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
