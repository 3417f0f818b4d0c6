"""Prefect's own database: whatever lies in its place, a run gets a sound one, and what was damaged is set aside aloud."""

import contextlib
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.server.database import damage_of, database_for
from mem_core.domain.errors import EnvironmentUnfit

TABLES = ("flow_run", "deployment", "log")


class Maker:
    """Stands in for Prefect's migrations, and counts."""

    def __init__(self) -> None:
        self.made = 0
        self.notes: list[str] = []

    def migrate(self, path: Path) -> None:
        self.made += 1
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
            connection.execute("INSERT INTO alembic_version VALUES ('abc')")
            for table in TABLES:
                connection.execute(f"CREATE TABLE {table} (id TEXT PRIMARY KEY, text TEXT)")
            connection.commit()

    def database(self, folder: Path, key: str = "run") -> Path:
        return database_for(folder, key, self.migrate, self.notes.append)


def fill(database: Path, num_rows: int = 400) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.executemany("INSERT INTO log VALUES (?, ?)", [(str(number), "x" * 500) for number in range(num_rows)])
        connection.commit()


def rows(database: Path) -> int:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return int(connection.execute("SELECT count(*) FROM log").fetchone()[0])


def noise(path: Path, start: int = 0, length: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    length = len(content) - start if length is None else length
    content[start : start + length] = random.Random(7).randbytes(length)
    path.write_bytes(bytes(content))


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").touch()


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


def without_a_table(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE flow_run")
        connection.commit()


def of_another_revision(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'old'")
        connection.commit()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    "random": noise,
    "random from the second page on": lambda path: noise(path, 4096),
    "a page in the middle": lambda path: noise(path, 8 * 4096, 4096),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2 + 100),
    "a text": lambda path: path.write_text("hello"),
    "a folder": as_folder,
    "a fifo": as_fifo,
    "a dangling link": as_link,
    "a table is gone": without_a_table,
    "another revision": of_another_revision,
}


def test_a_database_is_made_once_from_a_template_and_found_again_with_what_it_holds(tmp_path: Path) -> None:
    maker = Maker()
    first = maker.database(tmp_path)
    fill(first)
    assert maker.database(tmp_path) == first != maker.database(tmp_path, "other")
    assert (rows(first), maker.made, maker.notes) == (400, 1, [])
    assert first.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_database_is_set_aside_and_built_anew(kind: str, tmp_path: Path) -> None:
    maker = Maker()
    database = maker.database(tmp_path)
    fill(database)
    DAMAGES[kind](database)
    assert maker.database(tmp_path) == database
    assert rows(database) == 0
    assert os.path.lexists(f"{database}.damaged")
    assert len(maker.notes) == 1
    assert "was damaged" in maker.notes[0]
    assert maker.made == 1, "the template was sound"
    DAMAGES[kind](database)
    maker.database(tmp_path)
    assert len(list(tmp_path.glob("runs/*.damaged"))) == 1, "only the newest one is kept"


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_template_is_made_anew_and_no_run_gets_a_copy(kind: str, tmp_path: Path) -> None:
    maker = Maker()
    maker.database(tmp_path, "before")
    (template,) = tmp_path.glob("template-*.db")
    DAMAGES[kind](template)
    database = maker.database(tmp_path)
    (template,) = tmp_path.glob("template-*.db")
    assert (maker.made, len(maker.notes), damage_of(database, template)) == (2, 1, "")


def test_a_log_that_is_left_beside_a_new_database_is_not_played_into_it(tmp_path: Path) -> None:
    maker = Maker()
    database = maker.database(tmp_path)
    connection = sqlite3.connect(database)
    connection.execute("INSERT INTO log VALUES ('1', 'from the log')")
    connection.commit()
    log = database.with_name(f"{database.name}-wal").read_bytes()
    connection.close()
    assert log
    database.unlink()
    database.with_name(f"{database.name}-wal").write_bytes(log)
    assert rows(maker.database(tmp_path)) == 0


def test_a_database_that_somebody_writes_to_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    maker = Maker()
    database = maker.database(tmp_path)
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        other.execute("INSERT INTO log VALUES ('1', 'x')")
        assert maker.database(tmp_path) == database
        other.execute("COMMIT")
    assert (rows(database), maker.notes) == (1, [])


def test_a_folder_that_takes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "prefect").touch()
    with pytest.raises(EnvironmentUnfit, match="MEM_HOME"):
        Maker().database(tmp_path / "prefect")
