"""The few file system calls that commit protocols are made of, as a port, so that a disk that loses un-synced bytes can stand in.

A plain `write` is not durable until `sync_file`, and no name (created, renamed, removed) is durable until `sync_folder` of its parent.
"""

import errno
import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mem_core.domain.errors import StoreUnavailable
from mem_core.domain.units import format_bytes
from mem_core.infrastructure.storage.reading import JOURNAL_LIMIT_BYTES, copy_regular, open_regular, read_regular

EntryKind = Literal["file", "folder", "other"]
_HASH_CHUNK_BYTES = 1 << 20
_AWAY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ENODEV, errno.ENXIO,
                   errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.EFBIG})  # fmt: skip


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name in a folder. `other` is everything that is neither a plain file nor a folder: symbolic links, pipes, devices."""

    name: str
    kind: EntryKind
    size_bytes: int = 0
    modified_unix_s: float = 0.0


class Disk(Protocol):
    """File system calls with the meaning of POSIX. Errors are plain `OSError`; nothing follows a symbolic link at the last name."""

    def read(self, path: Path) -> bytes: ...

    def write(self, path: Path, data: bytes) -> None:
        """Create or overwrite in place: not atomic, not durable."""
        ...

    def copy_in(self, source: Path, target: Path) -> None:
        """Copy a file of the local machine to `target`: not atomic, not durable."""
        ...

    def copy_out(self, source: Path, target: Path) -> None:
        """Copy `source` to a file of the local machine, durable on return."""
        ...

    def digest(self, path: Path) -> tuple[int, str]:
        """(size in bytes, SHA-256 in hex) of a file, read in pieces."""
        ...

    def sync_file(self, path: Path) -> None: ...

    def sync_folder(self, path: Path) -> None: ...

    def make_folder(self, path: Path, *, parents: bool = False) -> None:
        """Raises FileExistsError if it is there (unless `parents`), FileNotFoundError if its parent is not."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Atomic. Replaces a file; raises OSError for a `new` folder that is not empty; FileNotFoundError if a parent is gone."""
        ...

    def link(self, old: Path, new: Path) -> None:
        """A second name for a file; raises FileExistsError: the create-only publish of a file system."""
        ...

    def remove_file(self, path: Path) -> None: ...

    def remove_folder(self, path: Path) -> None: ...

    def entries(self, path: Path) -> tuple[DirEntry, ...]:
        """What a folder holds, sorted by name."""
        ...

    def kind(self, path: Path) -> EntryKind | None:
        """None if the name is not there."""
        ...

    def free_bytes(self, path: Path) -> int: ...


class OsDisk:
    """The real one."""

    def read(self, path: Path) -> bytes:
        return read_regular(path, JOURNAL_LIMIT_BYTES)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def copy_in(self, source: Path, target: Path) -> None:
        copy_regular(source, target)

    def copy_out(self, source: Path, target: Path) -> None:
        copy_regular(source, target)
        self.sync_file(target)

    def digest(self, path: Path) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        with open_regular(path) as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
        return size, digest.hexdigest()

    def sync_file(self, path: Path) -> None:
        _sync(path, os.O_RDONLY)

    def sync_folder(self, path: Path) -> None:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def make_folder(self, path: Path, *, parents: bool = False) -> None:
        path.mkdir(parents=parents, exist_ok=parents)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new, follow_symlinks=False)

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def entries(self, path: Path) -> tuple[DirEntry, ...]:
        found: list[DirEntry] = []
        with os.scandir(path) as names:
            for name in names:
                try:
                    status = name.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed between the listing and the look
                found.append(DirEntry(name.name, _kind_of(status), status.st_size, status.st_mtime))
        return tuple(sorted(found, key=lambda entry: entry.name))

    def kind(self, path: Path) -> EntryKind | None:
        try:
            return _kind_of(path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


def _kind_of(status: os.stat_result) -> EntryKind:
    if stat.S_ISREG(status.st_mode):
        return "file"
    return "folder" if stat.S_ISDIR(status.st_mode) else "other"


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def walk_files(disk: Disk, folder: Path) -> tuple[tuple[str, DirEntry], ...]:
    """(relative POSIX path, entry) of everything below `folder` that is not a folder, sorted; bounded by the tree itself."""
    found: list[tuple[str, DirEntry]] = []
    waiting = [("", folder)]
    while waiting:
        prefix, current = waiting.pop()
        for entry in disk.entries(current):
            if entry.kind == "folder":
                waiting.append((f"{prefix}{entry.name}/", current / entry.name))
            else:
                found.append((f"{prefix}{entry.name}", entry))
    return tuple(sorted(found))


def walk_folders(disk: Disk, folder: Path) -> tuple[Path, ...]:
    """`folder` and every folder below it, deepest first."""
    found: list[Path] = [folder]
    for current in found:  # grows while it is walked: breadth first
        found.extend(current / entry.name for entry in disk.entries(current) if entry.kind == "folder")
    return tuple(reversed(found))


def remove_tree(disk: Disk, path: Path) -> None:
    """Remove a file or a folder with all that is in it; links are removed, never followed. Already gone is fine."""
    kind = disk.kind(path)
    if kind is None:
        return
    if kind != "folder":
        disk.remove_file(path)
        return
    folders = walk_folders(disk, path)
    for folder in folders:
        for entry in disk.entries(folder):
            if entry.kind != "folder":
                disk.remove_file(folder / entry.name)
        disk.remove_folder(folder)


def unavailable(exc: OSError, path: Path, disk: Disk, *, needed_bytes: int = 0) -> StoreUnavailable:
    """The message for people when a disk says no: what, where, which numbers, the way out."""
    free_bytes = _free_or_none(disk, path)
    numbers = "" if free_bytes is None else f", {format_bytes(free_bytes)} free"
    needed = f", {format_bytes(needed_bytes)} needed" if needed_bytes else ""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        problem, remedy = "the disk is full", "Free space or lower checkpoint.keep_last; the same command goes on from the last checkpoint."
    elif exc.errno == errno.EROFS:
        problem, remedy = "the file system is read-only", "Mount it for writing or choose another store."
    elif exc.errno in (errno.EACCES, errno.EPERM):
        problem, remedy = "permission denied", "Give this user the right to write there or choose another store."
    else:
        problem, remedy = f"the store failed ({exc.strerror or exc})", "Bring it back, then give the same command again."
    return StoreUnavailable(f"{problem} at {path}{numbers}{needed}", field="store", remedy=remedy)


def is_unavailable(exc: OSError) -> bool:
    """Whether the place itself says no, as opposed to a name that is missing or taken."""
    return exc.errno in _AWAY


def _free_or_none(disk: Disk, path: Path) -> int | None:
    for folder in (path, *path.parents):
        try:
            return disk.free_bytes(folder)
        except OSError:
            continue
    return None
