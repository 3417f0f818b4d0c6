"""A folder that others may read at any time: it takes its place once it is whole."""

import contextlib
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` once it is whole."""
    staging = folder.with_name(f".{folder.name}.partial")
    _move_steps(staging, folder)  # a crash in the middle of a swap left them there
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    yield staging
    _follow_umask(staging)
    _move_steps(folder, staging)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


def _follow_umask(folder: Path) -> None:
    """Weights are written for their owner alone by the library; a folder that is handed on follows the umask, whole."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def _move_steps(source: Path, target: Path) -> None:
    """Exports of single steps are folders of their own within the folder of the last one."""
    for step in source.glob("step-*"):
        if step.is_dir() and not (target / step.name).exists():
            target.mkdir(exist_ok=True)
            step.rename(target / step.name)
