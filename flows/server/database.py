"""Prefect's own database for an embedded server: a copy of a migrated template, proven before it is used, set aside where it is damaged.

The run folder is the truth about a run; what Prefect keeps here is a view of it. So a damaged file ends nothing: it is set aside
and built anew, aloud.
"""

import contextlib
import hashlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from mem_core.domain.errors import EnvironmentUnfit
from mem_core.infrastructure.machine.process_facts import start_ticks
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, copy_regular, read_regular

KEEP_DAYS = 14
CHECK_LIMIT_S = 30.0  # a database of gigabytes is not read to its end before each start
CHECK_EVERY_OPS = 100_000
SIDE_FILES = ("-wal", "-shm", "-journal")

Migrate = Callable[[Path], None]
Note = Callable[[str], None]


def database_for(folder: Path, run_key: str, migrate: Migrate, note: Note) -> Path:
    """A sound database for a run: its own from before, or a new one. One per run and Prefect version, so that two runs never wait for
    one SQLite lock.

    `migrate` makes a new database of this Prefect version at a path. `note` is told of what was damaged and where it lies now.

    Raises:
        EnvironmentUnfit: the folder cannot be written.
    """
    try:
        runs = folder / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        _remove_old(runs)
        key = f"{run_key} {version('prefect')}"
        database = runs / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.db"
        template = _template(folder, migrate, note)
        if os.path.lexists(database):
            problem = damage_of(database, template)
            if problem:
                aside = set_aside(database)
                note(
                    f"Prefect's database {database} was damaged ({problem}): set aside as {aside.name}, a new one is used. "
                    "Run folders are not touched; what was made in Prefect's UI with it is not in the new one."
                )
        if not database.exists():
            _copy(template, database)
        return database
    except OSError as exc:
        raise not_kept(exc, folder) from exc


def not_kept(exc: OSError, folder: Path) -> EnvironmentUnfit:
    """The error of a folder that does not take Prefect's files."""
    return EnvironmentUnfit(
        f"Prefect's database cannot be kept ({exc.strerror or exc})",
        field="MEM_HOME",
        value=exc.filename or folder,
        remedy="Make that folder writable and free space there, or set MEM_HOME to another one.",
    )


def damage_of(database: Path, template: Path) -> str:
    """What is wrong with a database; empty where it is sound: it has the template's tables and SQLite finds every page in order."""
    if database.is_symlink() or not database.is_file():
        return "it is no file"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{template}?mode=ro&immutable=1", uri=True)) as connection:
            wanted = _contents(connection)
        with contextlib.closing(sqlite3.connect(database, timeout=10.0)) as connection:
            found = _contents(connection)
            if not wanted <= found:
                return f"{len(wanted - found)} of its tables are missing or of another version" if found else "it is empty"
            return _quick_check(connection)
    except sqlite3.OperationalError as exc:  # locked by a server that uses it, for one
        return "" if "lock" in str(exc) or "interrupted" in str(exc) else str(exc)
    except sqlite3.DatabaseError as exc:
        return str(exc)


def _contents(connection: sqlite3.Connection) -> set[str]:
    """Names of the tables, and the revision that Prefect's migrations have brought it to."""
    names = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    revisions = connection.execute("SELECT version_num FROM alembic_version") if "alembic_version" in names else ()
    return names | {f"revision {revision}" for (revision,) in revisions}


def _quick_check(connection: sqlite3.Connection) -> str:
    end = time.monotonic() + CHECK_LIMIT_S
    connection.set_progress_handler(lambda: int(time.monotonic() > end), CHECK_EVERY_OPS)
    (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    return "" if answer == "ok" else str(answer).replace("\n", " ")[:200]


def set_aside(database: Path) -> Path:
    """Move it out of the way, with what SQLite keeps beside it: an old log would be played into the new file. The newest one is kept."""
    for suffix in ("", *SIDE_FILES):
        path = database.with_name(database.name + suffix)
        aside = path.with_name(f"{path.name}.damaged")
        if os.path.lexists(path):
            _remove(aside)
            path.rename(aside)
    return database.with_name(f"{database.name}.damaged")


def _template(folder: Path, migrate: Migrate, note: Note) -> Path:
    """A migrated, empty database of this Prefect version, made once: migrations take most of a fresh server's 19 s.

    Its name holds its digest, so that it proves itself each time without anything beside it.
    """
    for found in sorted(folder.glob(f"template-{version('prefect')}*.db")):
        if found.is_file() and found.name == _template_name(found):
            return found
        if found.stem != f"template-{version('prefect')}":  # that name was given before names held a digest
            note(f"{found} does not prove itself any more and is made anew")
        _remove(found)
    fresh = folder / f"template-{os.getpid()}.tmp"
    _remove_left_templates(folder)
    migrate(fresh)
    _fold_log(fresh)
    template = folder / _template_name(fresh)
    fresh.replace(template)
    return template


def _template_name(file: Path) -> str:
    return f"template-{version('prefect')}-{hashlib.sha256(read_regular(file, RECORD_LIMIT_BYTES)).hexdigest()[:16]}.db"


def _copy(template: Path, database: Path) -> None:
    """Whole or not at all, for this user's eyes only: it will hold what flow runs were given."""
    for suffix in SIDE_FILES:
        _remove(database.with_name(database.name + suffix))
    half = database.with_name(f"{database.name}.{os.getpid()}.tmp")
    copy_regular(template, half)
    half.chmod(0o600)
    half.replace(database)


def _fold_log(database: Path) -> None:
    """Fold SQLite's write-ahead log into the file, so that a copy of the file alone is complete."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for suffix in SIDE_FILES:
        _remove(database.with_name(database.name + suffix))


def _remove_old(runs: Path) -> None:
    for old in runs.glob("*.db*"):
        with contextlib.suppress(OSError):
            if time.time() - old.lstat().st_mtime > KEEP_DAYS * 86_400:
                _remove(old)


def _remove_left_templates(folder: Path) -> None:
    """Files of makers that were killed; each is named by its maker's pid."""
    for path in folder.glob("template-*.tmp*"):
        pid = path.name.removeprefix("template-").partition(".")[0]
        if not pid.isdigit() or int(pid) == os.getpid() or start_ticks(int(pid)) is None:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
