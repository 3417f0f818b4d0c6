"""What building and loading DeepSpeed's ops would meet here: compiler, ninja, compiled libraries, and locks of killed builds."""

import contextlib
import mmap
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from mem_core.domain.environment import BuildObservation, LockObservation
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, open_regular, read_regular

LOCK_NAME = "lock"
# On a shared filesystem the builder may be on another machine: only age tells. A build takes one to three minutes.
SHARED_LOCK_MAX_AGE_S = 600.0
# A lock is created before its owner's open file can be seen by us.
LOCAL_LOCK_MIN_AGE_S = 2.0
_SHARED_FILESYSTEMS = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "fuse.", "9p", "afs")
_TOOL_LIMIT_S = 20.0
_LOAD_LIMIT_S = 120.0
_LOAD_PROGRAM = """
import ctypes, sys
import torch
for path in sys.argv[1:]:
    try:
        ctypes.CDLL(path)
        print("ok")
    except OSError as error:
        print("bad", str(error).splitlines()[0][:300])
"""


def observe_build(folder: Path, environ: Mapping[str, str], *, load: bool = False) -> BuildObservation:
    """Look at the op folder and the tools that `environ` (a worker's environment) leads to.

    With `load`, compiled ops are opened in a process of its own, which takes as long as importing torch; without it only
    their shape is checked. Nothing is built or removed.
    """
    compiler, compiler_problem = _tool_version(environ.get("CXX", "c++"), environ)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler and not headers.is_file():
        compiler_problem = f"{headers} is missing (install Python's development headers)"
    ninja, ninja_problem = _tool_version("ninja", environ)
    libraries = sorted(folder.glob("*/*.so"))
    broken = _broken_libraries(libraries, environ, load=load)
    return BuildObservation(
        folder=str(folder),
        folder_writable=_writable(folder),
        compiler=compiler,
        compiler_problem=compiler_problem,
        ninja=ninja,
        ninja_problem=ninja_problem,
        built_ops=tuple(path.stem for path in libraries if path not in broken),
        broken_ops=tuple(f"{path.stem} ({why})" for path, why in broken.items()),
        locks=find_stale_locks(folder),
    )


def executable_problem(folder: Path) -> str:
    """Why compiled code in this folder (made where it is missing) could not be loaded; empty where it can be.

    Loading maps a file with permission to execute: a folder mounted `noexec` refuses that, whatever its mode bits say.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".exec-probe-") as file:
            file.write(bytes(mmap.PAGESIZE))
            file.flush()
            mmap.mmap(file.fileno(), mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def find_stale_locks(folder: Path, root: Path = Path("/"), now_unix_s: float | None = None) -> tuple[LockObservation, ...]:
    """Every build lock under an op folder, and whether its builder is gone.

    PyTorch's builder keeps its lock file open as long as it lives; a lock that no process has open was left by a killed one,
    and every later start would wait for it for ever, in silence.
    """
    locks = [path for path in sorted(folder.glob(f"*/{LOCK_NAME}")) if path.is_file()]
    if not locks:
        return ()
    now = time.time() if now_unix_s is None else now_unix_s
    shared = _on_shared_filesystem(folder, root)
    return tuple(_judge_lock(path, now, shared=shared, root=root) for path in locks if path.exists())


def remove_stale_locks(folder: Path, root: Path = Path("/")) -> tuple[str, ...]:
    """Remove locks whose builder is gone; returns their paths.

    Each is judged again right before, and only the very file that was judged is removed: a builder may have started since.
    """
    removed: list[str] = []
    for lock in find_stale_locks(folder, root):
        path = Path(lock.path)
        with contextlib.suppress(OSError):
            before = path.stat()
            again = _judge_lock(path, time.time(), shared=_on_shared_filesystem(folder, root), root=root)
            after = path.stat()
            if again.stale and (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns):
                path.unlink()
                removed.append(lock.path)
    return tuple(removed)


def _judge_lock(path: Path, now_unix_s: float, *, shared: bool, root: Path) -> LockObservation:
    try:
        age_s = max(0.0, now_unix_s - path.stat().st_mtime)
    except OSError:
        return LockObservation(path=str(path), age_s=0, stale=False, reason="it has just gone")
    owner, all_seen = _process_with_open(path, root)
    if owner is not None:
        return LockObservation(path=str(path), age_s=age_s, stale=False, reason=f"process {owner} has it open", owner_pid=owner)
    if shared or not all_seen:
        where = "its folder is on a shared filesystem" if shared else "some processes cannot be looked at"
        stale = age_s > SHARED_LOCK_MAX_AGE_S
        return LockObservation(path=str(path), age_s=age_s, stale=stale, reason=f"{age_s:.0f} s old; {where}, so that only age tells")
    return LockObservation(path=str(path), age_s=age_s, stale=age_s > LOCAL_LOCK_MIN_AGE_S, reason="no process has it open")


def _process_with_open(path: Path, root: Path) -> tuple[int | None, bool]:
    """(pid that has the file open, whether every process that could have written it was looked at)."""
    target, all_seen, own_uid = path.resolve(), True, os.geteuid()
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            descriptors = list((folder / "fd").iterdir())
        except PermissionError:
            # Another user's process matters only if it could have made the lock.
            all_seen = all_seen and path.exists() and path.stat().st_uid == own_uid
            continue
        except OSError:
            continue
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                if Path(os.readlink(descriptor)) == target:
                    return int(folder.name), all_seen
    return None, all_seen


def _on_shared_filesystem(folder: Path, root: Path) -> bool:
    """Whether the longest mount point above the folder is a network filesystem."""
    try:
        lines = read_regular(root / "proc" / "mounts", RECORD_LIMIT_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return False
    mounts = [(fields[1], fields[2]) for fields in (line.split() for line in lines) if len(fields) >= 3]
    above = [(point, kind) for point, kind in mounts if folder.absolute().is_relative_to(point)]
    kind = max(above, key=lambda mount: len(mount[0]), default=("", ""))[1]
    return kind.startswith(_SHARED_FILESYSTEMS)


def _tool_version(command: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """(first line that `command --version` prints, problem): looks at what runs, not at what is installed."""
    words = command.split()
    path = shutil.which(words[0], path=environ.get("PATH")) if words else None
    if path is None:
        return "", f"{command!r} is not on PATH"
    try:
        done = subprocess.run(
            [path, *words[1:], "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_LIMIT_S,
            env=dict(environ),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return "", f"{path} does not run: {exc}"
    first = next(iter(done.stdout.splitlines()), "").strip()
    if done.returncode or not first:
        return "", f"{path} --version ended with status {done.returncode}: {(done.stderr or done.stdout).strip()[:200] or 'no output'}"
    return first, ""


def _writable(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, can be written."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)


def _broken_libraries(libraries: list[Path], environ: Mapping[str, str], *, load: bool) -> dict[Path, str]:
    broken = {path: problem for path in libraries if (problem := _elf_problem(path))}
    whole = [path for path in libraries if path not in broken]
    if not load or not whole:
        return broken
    command = [sys.executable, "-c", _LOAD_PROGRAM, *map(str, whole)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LOAD_LIMIT_S, env=dict(environ), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return broken | dict.fromkeys(whole, f"loading it did not end: {exc}"[:200])
    lines = done.stdout.splitlines()
    for index, path in enumerate(whole):
        line = lines[index] if index < len(lines) else f"bad the process died with status {done.returncode}"
        if line != "ok":
            broken[path] = line.removeprefix("bad ")
    return broken


def _elf_problem(path: Path) -> str:
    """Why this cannot be a whole shared library; empty when it may be. A killed linker leaves a short file."""
    try:
        size_bytes = path.stat().st_size
        with open_regular(path) as file:
            header = file.read(64)
    except OSError as exc:
        return str(exc)
    if len(header) < 64 or header[:4] != b"\x7fELF" or header[4] != 2:
        return "not a 64-bit ELF file"
    sections_at = int.from_bytes(header[40:48], "little")
    sections_bytes = int.from_bytes(header[58:60], "little") * int.from_bytes(header[60:62], "little")
    return "cut short" if sections_at + sections_bytes > size_bytes else ""
