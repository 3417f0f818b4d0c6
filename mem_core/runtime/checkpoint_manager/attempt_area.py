"""The corner of the run folder that belongs to one attempt: the fence that no stopped writer can pass (I6).

    <run>/staging/attempt-N/save-K-step-...   what rank processes write before a commit
    <run>/staging/attempt-N/desk/             what this process moves in and out: verdicts on their way, bad and replaced checkpoints, trash

Every change that an attempt makes to shared folders is one `rename` whose source or target lies here. A newer attempt begins by renaming
the older one's folder away. From then on each such rename of the older one fails in the kernel, also when that process was stopped
between its check of the lease and the call. The desk is separate because stray rank processes may make their save folder anew
(`os.makedirs`), but never a desk.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.errors import MemError, RunHeld, StoreUnavailable
from mem_core.infrastructure.storage.disk import Disk, remove_tree
from mem_core.infrastructure.storage.local import make_folders

_ATTEMPT = re.compile(r"^attempt-(\d+)$")
_REPLACED = re.compile(r"^replaced-(\d+)-(step-\d{9,})$")
_BAD = re.compile(r"^(bad|whole)-(\d+)-(step-\d{9,})$")
_SHELVES = {"bad": "q", "whole": "kept"}  # what is on its way to quarantine -> the first part of its name there
_SAVE = re.compile(r"^save-(\d+)-step-(\d{9,})$")
_COUNTED = re.compile(r"^[a-z]+-(\d+)(?:-|$)")


class AttemptArea:
    """Staging and desk of one attempt. Not thread-safe by itself: the manager holds its lock."""

    def __init__(self, disk: Disk, run_folder: Path, attempt: int) -> None:
        self._disk = disk
        self._attempt = attempt
        self._all = run_folder / "staging"
        self.folder = self._all / f"attempt-{attempt}"
        self.desk = self.folder / "desk"
        self.checkpoints = run_folder / "checkpoints"
        self.quarantine = run_folder / "quarantine"

    def take_over(self, fence: Callable[[], None]) -> None:
        """Shut every older attempt out, then finish or undo what it left half done. Does nothing the second time.

        Raises:
            RunHeld: a newer attempt has begun.
        """
        fence()
        for folder in (self.checkpoints, self.quarantine, self._all):
            make_folders(self._disk, folder)
        attempts = self._attempts()
        if any(number > self._attempt for number in attempts):
            raise self.held()
        make_folders(self._disk, self.desk)
        for number in sorted(attempts, reverse=True):
            if number < self._attempt:
                self._disk.rename(self._all / f"attempt-{number}", self.desk / f"taken-{number}")
        self._disk.sync_folder(self.desk)
        self._disk.sync_folder(self._all)
        self._recover()
        self.empty_trash()

    def new_save(self, step: int) -> Path:
        """A fresh empty folder for the engine's files of one checkpoint."""
        with self.fenced():
            path = self.folder / f"save-{self._next_number(self.folder)}-{checkpoint_name(step)}"
            self._disk.make_folder(path)
        return path

    def owns_save(self, path: Path) -> bool:
        """Whether `path` was handed out by `new_save` of this attempt."""
        return path.parent == self.folder and _SAVE.match(path.name) is not None

    def aside(self, what: str, source: Path) -> Path:
        """Move a checkpoint folder to the desk under the name `<what>-<number>-<its name>`; durable on return."""
        with self.fenced():
            target = self.desk / f"{what}-{self._next_number(self.desk)}-{source.name}"
            self._disk.rename(source, target)
            self._disk.sync_folder(self.desk)
            self._disk.sync_folder(source.parent)
        return target

    def publish_file(self, data: bytes, target: Path) -> None:
        """Replace a file in a shared folder, atomically and durably, through the desk."""
        with self.fenced():
            partial = self.desk / f"partial-{self._next_number(self.desk)}"
            self._disk.write(partial, data)
            self._disk.sync_file(partial)
            self._disk.rename(partial, target)
            self._disk.sync_folder(target.parent)

    def to_quarantine(self, checkpoint: Path, keep: int, *, whole: bool = False) -> None:
        """Move a checkpoint to quarantine; a crash in between is finished by `take_over`.

        Damaged ones are trimmed to the `keep` newest. One that is `whole` (another run's, or one that the engine cannot load) is
        somebody's work: it stays until a person removes it.
        """
        what = "whole" if whole else "bad"
        self._shelve(self.aside(what, checkpoint), checkpoint.name, what)
        damaged = [name for name in self._numbered(self.quarantine) if name.startswith(f"{_SHELVES['bad']}-")]
        for name in damaged[:-keep]:
            with contextlib.suppress(OSError):
                remove_tree(self._disk, self.aside("trash", self.quarantine / name))

    def empty_trash(self) -> tuple[str, ...]:
        """Remove what lies on the desk for good. Returns the names that could not be removed; they stay for the next time."""
        stuck: list[str] = []
        for entry in self._disk.entries(self.desk):
            replaced = _REPLACED.match(entry.name)
            still_needed = replaced and self._disk.kind(self.checkpoints / replaced.group(2)) is None
            if entry.name.startswith(("trash-", "replaced-", "partial-", "taken-")) and not still_needed:
                try:
                    remove_tree(self._disk, self.desk / entry.name)
                except OSError as exc:
                    stuck.append(f"{entry.name} ({exc.strerror or exc})")
        return tuple(stuck)

    def drop_saves(self, until_step: int, except_for: Path | None = None) -> None:
        """Remove saves of steps up to `until_step` that were never committed: a newer save proves their writers gone."""
        for entry in self._disk.entries(self.folder):
            match = _SAVE.match(entry.name)
            if match and int(match.group(2)) <= until_step and self.folder / entry.name != except_for:
                with contextlib.suppress(OSError):
                    remove_tree(self._disk, self.folder / entry.name)

    @contextlib.contextmanager
    def fenced(self) -> Iterator[None]:
        """Whatever fails after the own folder is gone fails because a newer attempt took it, or because the store went away with it."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, MemError) as exc:
            if self._disk.kind(self._all) != "folder":
                raise StoreUnavailable(
                    f"the run folder {self._all.parent} is not there",
                    field="store",
                    remedy="Bring the store back, then give the same command.",
                ) from exc
            if self._disk.kind(self.desk) != "folder":
                raise self.held() from exc
            raise

    def held(self) -> RunHeld:
        """The error of an attempt that a newer one has shut out."""
        return RunHeld(
            f"attempt {self._attempt} of the run in {self._all.parent} is no longer the newest",
            field="attempt",
            value=self._attempt,
            remedy="Let the newer attempt go on; it continues from the last validated checkpoint.",
        )

    def _attempts(self) -> tuple[int, ...]:
        return tuple(int(match.group(1)) for entry in self._disk.entries(self._all) if (match := _ATTEMPT.match(entry.name)))

    def _recover(self) -> None:
        """Put back checkpoints that were moved aside for a replacement that never came, and shelve bad ones on their way."""
        desks = self._desks()
        for desk in desks:
            for entry in self._disk.entries(desk):
                if match := _BAD.match(entry.name):
                    self._shelve(desk / entry.name, match.group(3), match.group(1))
        for desk in desks:
            for name in reversed(self._numbered(desk)):
                match = _REPLACED.match(name)
                if match and self._disk.kind(self.checkpoints / match.group(2)) is None:
                    self._disk.rename(desk / name, self.checkpoints / match.group(2))
                    self._disk.sync_folder(self.checkpoints)

    def _desks(self) -> tuple[Path, ...]:
        """Own desk and those of the taken attempts, newest first; an attempt that died while taking over has others nested in its desk."""
        found = [self.desk]
        for desk in found:  # grows while it is walked; bounded by the tree
            taken = [entry.name for entry in self._disk.entries(desk) if entry.name.startswith("taken-")]
            inner = [desk / name / "desk" for name in sorted(taken, key=lambda name: int(name.split("-")[1]), reverse=True)]
            found.extend(path for path in inner if self._disk.kind(path) == "folder")
        return tuple(found)

    def make_again(self, folder: Path) -> None:
        """A folder of the run that somebody removed under it; never anything above, which would be another store in the same place."""
        if self._disk.kind(folder) is None:
            with contextlib.suppress(FileExistsError):
                self._disk.make_folder(folder)
            self._disk.sync_folder(folder.parent)

    def _shelve(self, bad: Path, name: str, what: str) -> None:
        self.make_again(self.quarantine)
        number = self._next_number(self.quarantine)
        self._disk.rename(bad, self.quarantine / f"{_SHELVES[what]}-{number}-{name}")
        self._disk.sync_folder(self.quarantine)
        self._disk.sync_folder(bad.parent)

    def _numbered(self, folder: Path) -> list[str]:
        """Names that carry a number, lowest first."""
        names = [(int(match.group(1)), entry.name) for entry in self._disk.entries(folder) if (match := _COUNTED.match(entry.name))]
        return [name for _, name in sorted(names)]

    def _next_number(self, folder: Path) -> int:
        names = self._numbered(folder)
        match = _COUNTED.match(names[-1]) if names else None
        return int(match.group(1)) + 1 if match else 1
