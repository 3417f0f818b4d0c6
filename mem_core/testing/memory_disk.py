"""A disk in memory that forgets what was not synced: stand-in for the real one where a crash must be tried at every call.

What survives a crash is a choice of `Loss`, since file systems differ: names may outlive their data and data may come back as zeros.
A rename is one journal transaction, as on ext4, xfs and btrfs: syncing either folder makes both sides of it durable, never one.
"""

import errno
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from mem_core.infrastructure.storage.disk import DirEntry, EntryKind

Loss = Literal["kill", "strict", "empty", "torn", "zeros"]
LOSSES: tuple[Loss, ...] = ("kill", "strict", "empty", "torn", "zeros")
"""kill: only the process died, all survives. strict: only synced data under synced names. The rest keep every name: un-synced data comes
back empty, cut in half, or as zeros."""


class Crashed(BaseException):
    """The machine is gone. Not an `Exception`: no handler of the code under test may survive it."""


class _File:
    def __init__(self, data: bytes = b"", durable: bytes | None = None) -> None:
        self.data = data
        self.durable = durable


class _Folder:
    def __init__(self) -> None:
        self.live: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}


_Node = _File | _Folder


class MemoryDisk:
    """`Disk` without a disk. `before(operation, path)` is called ahead of every call and may raise.

    `operations` counts the calls that change something: crash points.
    """

    CHANGES = frozenset({"write", "sync_file", "sync_folder", "make_folder", "rename", "link", "remove_file", "remove_folder"})

    def __init__(self, before: Callable[[str, Path], None] | None = None, free_bytes: int = 1 << 40) -> None:
        self._root = _Folder()
        self._moves: list[tuple[_Folder, str, _Folder, str, _Node]] = []
        self.before = before
        self.operations = 0
        self.free = free_bytes

    # -- Disk ---------------------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> bytes:
        self._called("read", path)
        return self._file(path).data

    def write(self, path: Path, data: bytes) -> None:
        self._called("write", path)
        folder = self._parent(path)
        node = folder.live.get(path.name)
        if isinstance(node, _Folder):
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
        if node is None:
            folder.live[path.name] = _File(data)
        else:
            node.data = data

    def copy_in(self, source: Path, target: Path) -> None:
        self.write(target, source.read_bytes())

    def copy_out(self, source: Path, target: Path) -> None:
        target.write_bytes(self.read(source))

    def digest(self, path: Path) -> tuple[int, str]:
        data = self.read(path)
        return len(data), hashlib.sha256(data).hexdigest()

    def sync_file(self, path: Path) -> None:
        self._called("sync_file", path)
        file = self._file(path)
        file.durable = file.data

    def sync_folder(self, path: Path) -> None:
        self._called("sync_folder", path)
        folder = self._folder(path)
        for source, old, target, new, node in self._moves:
            if folder is source:
                target.durable[new] = node
            elif folder is target and source.durable.get(old) is node:
                del source.durable[old]
        self._moves = [move for move in self._moves if folder is not move[0] and folder is not move[2]]
        folder.durable = dict(folder.live)

    def make_folder(self, path: Path, *, parents: bool = False) -> None:
        self._called("make_folder", path)
        if parents:
            for parent in reversed(path.parents):
                if parent != Path(parent.anchor) and self.kind(parent) is None:
                    self._parent(parent).live[parent.name] = _Folder()
        folder = self._parent(path)
        if path.name in folder.live:
            if parents:
                return
            raise FileExistsError(errno.EEXIST, "is there", str(path))
        folder.live[path.name] = _Folder()

    def rename(self, old: Path, new: Path) -> None:
        self._called("rename", old)
        source, target = self._parent(old), self._parent(new)
        node = source.live.get(old.name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "not there", str(old))
        there = target.live.get(new.name)
        if isinstance(there, _Folder) and (there.live or not isinstance(node, _Folder)):
            raise OSError(errno.ENOTEMPTY, "not empty", str(new))
        if isinstance(there, _File) and isinstance(node, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, "a file", str(new))
        del source.live[old.name]
        target.live[new.name] = node
        if source is not target:
            self._moves.append((source, old.name, target, new.name, node))

    def link(self, old: Path, new: Path) -> None:
        self._called("link", old)
        folder = self._parent(new)
        if new.name in folder.live:
            raise FileExistsError(errno.EEXIST, "is there", str(new))
        folder.live[new.name] = self._file(old)

    def remove_file(self, path: Path) -> None:
        self._called("remove_file", path)
        self._file(path)
        del self._parent(path).live[path.name]

    def remove_folder(self, path: Path) -> None:
        self._called("remove_folder", path)
        if self._folder(path).live:
            raise OSError(errno.ENOTEMPTY, "not empty", str(path))
        del self._parent(path).live[path.name]

    def entries(self, path: Path) -> tuple[DirEntry, ...]:
        self._called("entries", path)
        return tuple(_entry(name, node) for name, node in sorted(self._folder(path).live.items()))

    def kind(self, path: Path) -> EntryKind | None:
        self._called("kind", path)
        node = self._find(path)
        return None if node is None else "folder" if isinstance(node, _Folder) else "file"

    def free_bytes(self, path: Path) -> int:
        return self.free

    # -- crash and damage ---------------------------------------------------------------------------------------------------------

    def after_crash(self, loss: Loss) -> "MemoryDisk":
        """What the next boot finds, as a new disk on which everything is durable."""
        disk = MemoryDisk(free_bytes=self.free)
        disk._root = _survive(self._root, loss, {})
        return disk

    def damage(self, path: Path) -> None:
        """Flip one bit of a file behind everyone's back."""
        file = self._file(path)
        file.data = bytes([file.data[0] ^ 1]) + file.data[1:] if file.data else b"\0"
        file.durable = file.data

    def files(self) -> dict[str, bytes]:
        """Every file by path: the whole state, for comparing."""
        return dict(_walk("", self._root))

    # -- inside -------------------------------------------------------------------------------------------------------------------

    def _called(self, operation: str, path: Path) -> None:
        if operation in self.CHANGES:
            self.operations += 1
        if self.before is not None:
            self.before(operation, path)

    def _find(self, path: Path) -> _Node | None:
        node: _Node | None = self._root
        for part in path.parts[1:]:
            if not isinstance(node, _Folder):
                return None
            node = node.live.get(part)
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._find(path)
        if isinstance(node, _Folder):
            return node
        raise (
            FileNotFoundError(errno.ENOENT, "not there", str(path))
            if node is None
            else NotADirectoryError(errno.ENOTDIR, "a file", str(path))
        )

    def _file(self, path: Path) -> _File:
        node = self._find(path)
        if isinstance(node, _File):
            return node
        raise (
            FileNotFoundError(errno.ENOENT, "not there", str(path))
            if node is None
            else IsADirectoryError(errno.EISDIR, "a folder", str(path))
        )

    def _parent(self, path: Path) -> _Folder:
        return self._folder(path.parent)


class CrashAt:
    """A `before` hook: the machine is gone from the n-th changing call on (counted from 0), before that call acts."""

    def __init__(self, point: int) -> None:
        self._left = point
        self.crashed = False

    def __call__(self, operation: str, path: Path) -> None:
        if operation in MemoryDisk.CHANGES:
            self.crashed = self.crashed or self._left == 0
            self._left -= 1
        if self.crashed:
            raise Crashed(f"{operation} {path}")


def _entry(name: str, node: _Node) -> DirEntry:
    return DirEntry(name, "folder") if isinstance(node, _Folder) else DirEntry(name, "file", len(node.data))


def _survive(folder: _Folder, loss: Loss, seen: dict[int, _Node]) -> _Folder:
    kept = _Folder()
    for name, node in (folder.durable if loss == "strict" else folder.live).items():
        if id(node) not in seen:
            seen[id(node)] = _survive(node, loss, seen) if isinstance(node, _Folder) else _survive_file(node, loss)
        kept.live[name] = seen[id(node)]
    kept.durable = dict(kept.live)
    return kept


def _survive_file(file: _File, loss: Loss) -> _File:
    durable = file.durable or b""
    synced = file.durable is not None and file.durable == file.data
    match loss:
        case "kill":
            data = file.data
        case "strict" | "empty":
            data = durable
        case "torn":
            data = file.data if synced else file.data[: len(file.data) // 2]
        case "zeros":
            data = file.data if synced else bytes(len(file.data))
    return _File(data, data)


def _walk(prefix: str, folder: _Folder) -> Iterator[tuple[str, bytes]]:
    for name, node in folder.live.items():
        if isinstance(node, _Folder):
            yield from _walk(f"{prefix}/{name}", node)
        else:
            yield f"{prefix}/{name}", node.data
