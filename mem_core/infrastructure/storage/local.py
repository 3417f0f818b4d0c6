"""A folder of a file system as a `Store`: replace by rename, create-only by link, everything synced before it is named."""

import contextlib
import errno
import uuid
from collections.abc import Iterator
from pathlib import Path

from mem_core.domain.errors import StoreUnavailable
from mem_core.infrastructure.storage.disk import Disk, OsDisk, is_unavailable, unavailable, walk_files
from mem_core.infrastructure.storage.port import AlreadyExists, KeyMissing, ObjectStat, Unfinished, check_key

_PARTIAL = ".partial-"
MOST_UNFINISHED = 1_000


class LocalStore:
    """`Store` over a `Disk`. Half-written files carry a reserved name that no listing shows."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self._root = root
        self._disk: Disk = disk or OsDisk()
        self._seen = False

    @property
    def url(self) -> str:
        return str(self._root)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with self._translated(path):
            return self._disk.read(path)

    def write(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._translated(path, writing=True), self._partial(path) as partial:
            self._disk.write(partial, data)
            self._disk.sync_file(partial)
            self._disk.rename(partial, path)
            self._disk.sync_folder(path.parent)

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._translated(path, writing=True), self._partial(path) as partial:
            self._disk.write(partial, data)
            self._disk.sync_file(partial)
            self._disk.link(partial, path)
            self._disk.sync_folder(path.parent)

    def put_file(self, source: Path, key: str, *, sha256: str = "") -> ObjectStat:
        path = self._path(key)
        with self._translated(path, writing=True), self._partial(path) as partial:
            self._disk.copy_in(source, partial)
            self._disk.sync_file(partial)
            wanted = (source.stat().st_size, sha256 or OsDisk().digest(source)[1])
            if self._disk.digest(partial) != wanted:
                raise StoreUnavailable(f"the copy of {source.name} at {path} differs from the original", field="store",
                                       remedy="Check the disk, then give the same command again.")  # fmt: skip
            self._disk.rename(partial, path)
            self._disk.sync_folder(path.parent)
        return ObjectStat(key, wanted[0])

    def get_file(self, key: str, target: Path) -> None:
        path = self._path(key)
        partial = target.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        with self._translated(path):
            try:
                self._disk.copy_out(path, partial)
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)

    def list(self, prefix: str) -> tuple[ObjectStat, ...]:
        return tuple(item for item in self._files(prefix) if not _is_partial(item.key))

    def stat(self, key: str) -> ObjectStat | None:
        path = self._path(key)
        with self._translated(path):
            if self._disk.kind(path) != "file":
                return None
            entries = [entry for entry in self._disk.entries(path.parent) if entry.name == path.name]
        return ObjectStat(key, entries[0].size_bytes, entries[0].modified_unix_s) if entries else None

    def delete(self, key: str) -> bool:
        path = self._path(key)
        with self._translated(path):
            try:
                self._disk.remove_file(path)
                self._disk.sync_folder(path.parent)
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def unfinished(self, prefix: str) -> tuple[Unfinished, ...]:
        return tuple(Unfinished(item.key, "") for item in self._files(prefix) if _is_partial(item.key))[:MOST_UNFINISHED]

    def abandon(self, unfinished: Unfinished) -> None:
        self.delete(unfinished.key)

    def _files(self, prefix: str) -> tuple[ObjectStat, ...]:
        folder = self._root / check_key(prefix, allow_empty=True) if prefix else self._root
        with self._translated(folder):
            self._seen = self._seen or self._disk.kind(self._root) == "folder"
            if self._disk.kind(folder) != "folder":
                return ()
            before = f"{prefix}/" if prefix else ""
            found = walk_files(self._disk, folder)
        return tuple(
            ObjectStat(f"{before}{name}", entry.size_bytes, entry.modified_unix_s) for name, entry in found if entry.kind == "file"
        )

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextlib.contextmanager
    def _partial(self, path: Path) -> Iterator[Path]:
        """A name beside `path` that is gone again afterwards, whatever happens; parents are made and made durable.

        The root is made the first time only: once it has been there, its absence means that the file system below it is gone.
        """
        if self._seen and self._disk.kind(self._root) is None:
            raise FileNotFoundError(errno.ENOENT, "the store is gone", str(self._root))
        make_folders(self._disk, path.parent)
        self._seen = True
        partial = path.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        try:
            yield partial
        finally:
            with contextlib.suppress(OSError):
                self._disk.remove_file(partial)

    @contextlib.contextmanager
    def _translated(self, path: Path, *, writing: bool = False) -> Iterator[None]:
        try:
            yield
        except FileExistsError as exc:
            raise AlreadyExists(f"{path} is already there") from exc
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as exc:
            if writing:
                raise unavailable(exc, path, self._disk) from exc
            raise KeyMissing(f"nothing at {path}") from exc
        except OSError as exc:
            if not is_unavailable(exc):
                raise
            raise unavailable(exc, path, self._disk) from exc


def _is_partial(key: str) -> bool:
    return key.rpartition("/")[2].startswith(_PARTIAL)


def make_folders(disk: Disk, folder: Path) -> None:
    """Make a folder and its missing parents, each made durable in its own parent."""
    missing: list[Path] = []
    current = folder
    while disk.kind(current) is None:
        missing.append(current)
        current = current.parent
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            disk.make_folder(path)
        disk.sync_folder(path.parent)
