"""Model folders behind URLs, fetched once. What was fetched proves itself at each use, or is fetched again."""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mem_core.domain.errors import StoreUnavailable
from mem_core.infrastructure.storage.reading import open_regular
from mem_core.infrastructure.storage.sealed import read_sealed, remove_whatever, sealed

_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken")
_MOST_PROOF_BYTES = 2**24
# Reading gigabytes of weights at every start would cost more than it finds: those are held against their size, and their headers and
# checksums are looked at when they are loaded.
_MOST_HASHED_BYTES = 2**26


def fetch_folder(url: str, cache_dir: Path) -> Path:
    """The local copy of a model folder, named by what the store lists now.

    Raises:
        StoreUnavailable: the URL cannot be read, or the cache not be written.
    """
    import fsspec

    try:
        fs, root = fsspec.url_to_fs(url)
        entries = [entry for entry in fs.ls(root, detail=True) if entry["name"].endswith(_SUFFIXES)]
    except Exception as exc:  # each fsspec backend has an error tree of its own
        raise StoreUnavailable(
            f"the model cannot be listed: {exc}", field="model.source", value=url, remedy="Check the URL, endpoint and keys"
        ) from exc
    listing = sorted((entry["name"], entry["size"], str(entry.get("ETag", entry.get("mtime", "")))) for entry in entries)
    target = cache_dir / hashlib.sha256(json.dumps([url, listing]).encode()).hexdigest()[:32]
    if not _is_whole(target):
        _fetch(fs, [name for name, _, _ in listing], target, url)
    return target


def _fetch(fs: Any, names: list[str], target: Path, url: str) -> None:
    staging: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
        for name in names:
            fs.get_file(name, str(staging / name.rsplit("/", 1)[-1]))
        remove_whatever(target)
        remove_whatever(_proof(target))
        _proof(target).write_text(sealed(json.dumps({path.name: _facts(path) for path in staging.iterdir()})))
        staging.rename(target)
    except Exception as exc:  # as above; somebody else may also have been first
        if not _is_whole(target):
            raise StoreUnavailable(
                f"the model cannot be fetched: {exc}", field="model.source", value=url, remedy="Check the store and the free disk space"
            ) from exc
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _proof(target: Path) -> Path:
    """Beside the folder, which holds the model's files alone."""
    return target.with_name(f"{target.name}.fetched")


def _facts(path: Path) -> list[Any]:
    """Size, and the digest where reading the file is cheap."""
    size_bytes = path.stat().st_size
    if size_bytes > _MOST_HASHED_BYTES:
        return [size_bytes, ""]
    with open_regular(path) as file:
        return [size_bytes, hashlib.file_digest(file, "sha256").hexdigest()]


def _is_whole(target: Path) -> bool:
    """Whether the folder holds what was fetched into it."""
    text = read_sealed(_proof(target), _MOST_PROOF_BYTES)
    try:
        return text is not None and all(_facts(target / name) == facts for name, facts in json.loads(text).items())
    except OSError:
        return False
