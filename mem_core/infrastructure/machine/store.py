"""Whether a store can be written, read and deleted from, how much room it has, and who is in the run folder already."""

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mem_core.domain.checkpoint import MANIFEST_NAME, parse_checkpoint_name
from mem_core.domain.environment import FolderObservation, SavedRun, StoreObservation
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, local_name, read_json, read_regular

PROBE_PREFIX = ".mem-probe-"
_PROBE_BYTES = b"MEM was here\n" * 512
StoreProbe = Callable[[str], str]


def is_remote(store: str) -> bool:
    """Whether a store is reached through fsspec; `file://` is local."""
    return "://" in store and not store.startswith("file://")


def local_path(store: str) -> Path:
    """Absolute path of a local store."""
    return Path(local_name(store)).absolute()


def observe_store(store: str, probe_remote: StoreProbe, endpoint: str = "") -> StoreObservation:
    """Write, read and delete a probe. Remote stores are probed by `probe_remote(url)`, which returns the problem or ""."""
    if is_remote(store):
        return StoreObservation(location=store, local=False, endpoint=endpoint, problem=probe_remote(store))
    path = local_path(store)
    relative = not os.path.isabs(local_name(store))
    return StoreObservation(location=str(path), relative=relative, problem=probe_folder(path))


def probe_folder(folder: Path) -> str:
    """What prevents writing, syncing, reading back and deleting a file there; empty when nothing does.

    A folder that does not exist yet is tried in the nearest one above it, so that looking leaves nothing behind.
    """
    try:
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not existing.is_dir():
            return f"{existing} is not a folder"
        probe = existing / f"{PROBE_PREFIX}{uuid.uuid4().hex}"
        try:
            with probe.open("xb") as file:
                file.write(_PROBE_BYTES)
                file.flush()
                os.fsync(file.fileno())
            if read_regular(probe, len(_PROBE_BYTES)) != _PROBE_BYTES:
                return f"{existing}: what was read back is not what was written"
        finally:
            probe.unlink(missing_ok=True)
    except OSError as exc:
        return f"{exc.strerror or exc} at {exc.filename or folder}"
    return ""


def probe_url(url: str, options: Mapping[str, Any]) -> str:
    """The same for any fsspec URL, with one object under it. Never raises; no message carries a key."""
    import fsspec

    target = f"{url.rstrip('/')}/{PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        filesystem, path = fsspec.core.url_to_fs(target, **dict(options))
        filesystem.pipe_file(path, _PROBE_BYTES)
        try:
            if filesystem.cat_file(path) != _PROBE_BYTES:
                return "what was read back is not what was written"
        finally:
            filesystem.rm_file(path)
    except Exception as exc:  # noqa: BLE001  every backend has its own errors, and each of them means: not usable
        text = f"{type(exc).__name__}: {exc}"
        for value in options.values():
            if isinstance(value, str) and len(value) >= 4 and "://" not in value:
                text = text.replace(value, "***")
        return text[:300]
    return ""


def observe_folder(path: Path) -> FolderObservation | None:
    """Free bytes and inodes on the filesystem that holds, or will hold, the path; None when that cannot be told."""
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        stats = os.statvfs(existing)
    except (OSError, StopIteration):
        return None
    return FolderObservation(
        path=str(path),
        total_bytes=stats.f_blocks * stats.f_frsize,
        free_bytes=stats.f_bavail * stats.f_frsize,
        free_inodes=stats.f_favail if stats.f_files else None,
    )


def observe_saved(run_folder: Path) -> SavedRun | None:
    """Layout of the newest checkpoint that has a readable manifest; whether it is valid is not asked here."""
    try:
        folders = sorted((run_folder / "checkpoints").iterdir(), key=lambda path: parse_checkpoint_name(path.name) or -1, reverse=True)
    except OSError:
        return None
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = read_json(folder / MANIFEST_NAME)
            return SavedRun(
                num_ranks=manifest["num_ranks"],
                zero_stage=manifest["zero_stage"],
                step=manifest["step"],
                checkpoint_bytes=sum(int(entry["size_bytes"]) for entry in manifest["files"]),
            )
    return None


def find_leftovers(run_folder: Path, variable: str, root: Path = Path("/")) -> tuple[str, ...]:
    """Processes marked as belonging to this run (see `child_environment`) whose owner is gone, as "pid 12: command".

    Children of this process are its own and no left-overs.
    """
    marker = f"{variable}={run_folder.absolute()}".encode()
    found: list[str] = []
    for folder in sorted((root / "proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            if marker in read_regular(folder / "environ", RECORD_LIMIT_BYTES).split(b"\0") and not _is_ours(int(folder.name), root):
                command = read_regular(folder / "cmdline", RECORD_LIMIT_BYTES).replace(b"\0", b" ").decode("utf-8", "replace").strip()
                found.append(f"pid {folder.name}: {command[:80]}")
    return tuple(found)


def _is_ours(pid: int, root: Path) -> bool:
    """Whether the process is this one or below it."""
    for _ in range(64):
        if pid == os.getpid():
            return True
        try:
            pid = int(
                read_regular(root / "proc" / str(pid) / "stat", RECORD_LIMIT_BYTES).decode(errors="replace").rpartition(")")[2].split()[1]
            )
        except (OSError, ValueError, IndexError):
            return False
        if pid <= 1:
            return False
    return False
