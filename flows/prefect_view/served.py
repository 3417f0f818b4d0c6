"""Which runs `mem serve` shows beside Prefect's pages, and under which addresses.

    MEM_HOME/stores/KEY    the path of a folder that holds run folders; written by every run on this machine

A store is named by a key made from its path and never by the path itself, so that nothing that is asked for is ever taken for one.
"""

import contextlib
import hashlib
from pathlib import Path
from urllib.parse import quote

from mem_core.infrastructure.storage.reading import read_regular_text
from mem_core.infrastructure.telemetry.report_page import REPORT_NAME

PREFIX = "/mem/"
_PATH_LIMIT_BYTES = 1 << 16
_FOLDER = "stores"


def store_key(store: Path) -> str:
    """16 hexadecimal digits; the same for every spelling of the path."""
    return hashlib.sha256(str(store.resolve()).encode(errors="surrogateescape")).hexdigest()[:16]


def page_path(run_folder: Path) -> str:
    """The path of a run's report on the server."""
    return f"{PREFIX}runs/{store_key(run_folder.parent)}/{quote(run_folder.name, safe='')}/{REPORT_NAME}"


def remember_store(mem_home: Path, store: Path) -> None:
    """So that the server of this machine shows the runs there. What goes wrong costs only that."""
    with contextlib.suppress(OSError, ValueError):
        file = mem_home / _FOLDER / store_key(store)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(store.resolve()), encoding="utf-8")
            _forget_stores_that_are_gone(file.parent)


def _forget_stores_that_are_gone(folder: Path) -> None:
    """One that was only away, as a mount can be, is remembered again by its next run."""
    for file in folder.iterdir():
        if not Path(read_regular_text(file, _PATH_LIMIT_BYTES)).is_dir():
            file.unlink(missing_ok=True)


def known_stores(mem_home: Path) -> dict[str, Path]:
    """Stores by key, those that are there; a file whose name does not fit what it says is passed over."""
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for file in sorted((mem_home / _FOLDER).iterdir()):
            with contextlib.suppress(OSError, ValueError):
                store = Path(read_regular_text(file, _PATH_LIMIT_BYTES))
                if store.is_dir() and store_key(store) == file.name:
                    found[file.name] = store
    return found
