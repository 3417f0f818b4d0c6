"""Marks: how far a preparation is, kept so that the next one goes on from there.

    ledger.json          the last mark, sealed: whose it is, plain values, and the digest of the arrays beside it
    arrays-0.bin, -1     arrays of the last mark and of the one before
    keys.bin             digests of the documents so far, a byte with the length before each; only ever added to

A mark is written when everything that it counts is on the disk already, arrays first and the ledger last, by one rename. Whoever dies in
between leaves the mark before. What was written after a mark is not counted by it and is cut off again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mem_core.infrastructure.storage.reading import read_regular
from mem_core.infrastructure.storage.sealed import read_sealed, sealed
from mem_core.infrastructure.storage.writing import replace_text
from mem_core.runtime.data.serving.growing import GrowingFile

MARK_VERSION = 1
_LEDGER, _KEYS = "ledger.json", "keys.bin"
_MOST_LEDGER_BYTES, _MOST_ARRAY_BYTES, _MOST_KEY_BYTES = 2**28, 2**33, 2**30
_ARRAY = "$array"


def has_mark(folder: Path) -> bool:
    """Whether a mark lies there, of whatever worth."""
    return (folder / _LEDGER).is_file()


class Marks:
    """The marks of one preparation. `whose` is all that decides what it does: marks of another one are not its own."""

    def __init__(self, folder: Path, whose: str, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._whose = whose
        self._every_s = every_s
        self._clock = clock
        self._due_s = clock() + every_s
        self._number = 0
        self._keys: GrowingFile | None = None
        self.are_of_others = False  # told once they were looked for

    def latest(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """The last mark and the keys so far; None where there is none of this preparation that proves itself."""
        text = read_sealed(self._folder / _LEDGER, _MOST_LEDGER_BYTES)
        try:
            ledger = json.loads(text or "")
            if ledger["version"] != MARK_VERSION or ledger["whose"] != self._whose:
                self.are_of_others = ledger["version"] == MARK_VERSION
                return None
            self._number = int(ledger["number"])
            raw = read_regular(self._arrays_file, _MOST_ARRAY_BYTES)
            if hashlib.sha256(raw).hexdigest() != ledger["arrays_sha256"]:
                return None
            size_bytes, digest = ledger["keys"]
            self._keys = GrowingFile(self._folder / _KEYS, (int(size_bytes), str(digest)))
            return _unpacked(ledger["state"], _arrays(raw, ledger["shapes"])), list(_keys(self._folder / _KEYS))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def _arrays_file(self) -> Path:
        """Of the mark in hand, by turns: by its number alone, so that no ledger can name a file elsewhere."""
        return self._folder / f"arrays-{self._number % 2}.bin"

    def begin(self) -> None:
        """Forget every mark that may be here: the work begins at its beginning."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            path.unlink()
        self._keys = GrowingFile(self._folder / _KEYS)

    def due(self) -> bool:
        """Whether it is time for the next mark."""
        return self._clock() >= self._due_s

    def put(self, state: dict[str, Any], fresh_keys: list[bytes]) -> None:
        """Keep a mark of plain values, lists, dicts with texts for keys, and arrays. What it counts is on the disk. Raises OSError."""
        assert self._keys is not None, "marks are begun or taken up before one is put"
        self._keys.write(b"".join(bytes([len(key)]) + key for key in fresh_keys))
        self._keys.sync()
        self._number += 1
        arrays: list[NDArray[Any]] = []
        plain = _packed(state, arrays)
        raw = b"".join(array.tobytes() for array in arrays)
        with self._arrays_file.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        ledger = {
            "version": MARK_VERSION, "whose": self._whose, "number": self._number, "keys": list(self._keys.standing),
            "arrays_sha256": hashlib.sha256(raw).hexdigest(), "shapes": [[array.dtype.str, array.size] for array in arrays], "state": plain,
        }  # fmt: skip
        replace_text(self._folder / _LEDGER, sealed(json.dumps(ledger)))
        self._due_s = self._clock() + self._every_s

    def close(self) -> None:
        """Close what is open."""
        if self._keys is not None:
            self._keys.close()


def _packed(value: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(cast(NDArray[Any], value))
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, dict):
        return {str(name): _packed(inner, arrays) for name, inner in cast(dict[Any, Any], value).items()}
    return [_packed(inner, arrays) for inner in cast(list[Any], value)] if isinstance(value, list) else value


def _unpacked(value: Any, arrays: list[NDArray[Any]]) -> Any:
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return arrays[fields[_ARRAY]] if _ARRAY in fields else {name: _unpacked(inner, arrays) for name, inner in fields.items()}
    return [_unpacked(inner, arrays) for inner in cast(list[Any], value)] if isinstance(value, list) else value


def _arrays(raw: bytes, shapes: list[tuple[str, int]]) -> list[NDArray[Any]]:
    found: list[NDArray[Any]] = []
    at = 0
    for kind, size in shapes:
        array = np.frombuffer(raw, np.dtype(kind), size, at)
        found.append(array)
        at += array.nbytes
    return found


def _keys(path: Path) -> Iterator[bytes]:
    raw, at = read_regular(path, _MOST_KEY_BYTES), 0
    while at < len(raw):
        yield raw[at + 1 : at + 1 + raw[at]]
        at += 1 + raw[at]
