"""The storage port: what every place that holds checkpoints can do. One contract suite runs on every adapter."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from mem_core.domain.errors import InternalError


class KeyMissing(FileNotFoundError):
    """Nothing is stored under this key."""


class AlreadyExists(FileExistsError):
    """`create` met a key that is already there; what was there is unchanged."""


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """One stored object. `modified_unix_s` is the store's clock and serves people only."""

    key: str
    size_bytes: int
    modified_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Bytes of an object that never became whole because its writer died; no listing shows them and they take up space."""

    key: str
    upload_id: str


class Store(Protocol):
    """Objects under relative POSIX keys. Safe to use from several threads. Nothing that it answers comes from a cache.

    Every method raises `StoreUnavailable` (exit 73) when the place is full, read-only, denied or away after bounded retries.
    No error text carries a credential.
    """

    @property
    def url(self) -> str:
        """Where this is, for people: without credentials."""
        ...

    def read(self, key: str) -> bytes:
        """The whole object. Raises `KeyMissing`."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Create or replace. Readers see the old or the new bytes, never a part; durable on return."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Create only. Raises `AlreadyExists`, also when another writer wins the race; durable on return.

        A store over a network may take the same bytes for its own lost try: what must have one winner needs something unique in it.
        """
        ...

    def put_file(self, source: Path, key: str, *, sha256: str = "") -> ObjectStat:
        """Copy a local file in, then prove the copy by size and checksum; durable on return.

        `sha256` is that of the source where the caller knows it already. Raises `StoreUnavailable` if the copy cannot be proven.
        """
        ...

    def get_file(self, key: str, target: Path) -> None:
        """Copy an object to a local file, which appears whole or not at all. Raises `KeyMissing`."""
        ...

    def list(self, prefix: str) -> tuple[ObjectStat, ...]:
        """Every object whose key starts with `prefix` followed by `/` (all for ""), sorted by key. Empty if there is none."""
        ...

    def stat(self, key: str) -> ObjectStat | None:
        """Size of an object, or None."""
        ...

    def delete(self, key: str) -> bool:
        """Remove an object. False if there was none: two owners deleting the same key is no error."""
        ...

    def unfinished(self, prefix: str) -> tuple[Unfinished, ...]:
        """What dead writers (and those at work now) have begun below `prefix` and not finished; a thousand at most, sorted."""
        ...

    def abandon(self, unfinished: Unfinished) -> None:
        """Remove it; that it is gone already is no error."""
        ...


def check_key(key: str, *, allow_empty: bool = False) -> str:
    """The key itself, if it is relative and stays inside the store.

    Raises:
        InternalError: absolute, empty, with `..`, with a backslash, a NUL, or an empty part. Keys are made by MEM, never by users.
    """
    if not key and allow_empty:
        return key
    parts = key.split("/")
    bad = not key or "\\" in key or "\0" in key or any(part in ("", ".", "..") for part in parts) or PurePosixPath(key).is_absolute()
    if bad:
        raise InternalError(
            "a storage key must be relative and stay inside the store", field="key", value=key, remedy="Report this as a bug."
        )
    return key
