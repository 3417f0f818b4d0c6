"""A file that is only ever added to, and how it is believed again after its writer died."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from mem_core.infrastructure.storage.reading import open_regular

_BLOCK_BYTES = 2**20
Standing = tuple[int, str]
"""How many bytes a file has, and the SHA-256 of them."""


class GrowingFile:
    """A file with the digest of all that was written to it.

    Made anew, or taken up again: then it is cut to where it stood when that was noted, since whatever was added later may be half
    written, and what it held then has to be there to the bit.
    """

    def __init__(self, path: Path, standing: Standing | None = None) -> None:
        """Raises OSError; ValueError where the file does not hold what `standing` says."""
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        if standing is not None:
            self._believe(path, *standing)
        self._file: BinaryIO = path.open("wb" if standing is None else "ab")
        if standing is not None:
            self._file.truncate(self._size_bytes)

    def _believe(self, path: Path, size_bytes: int, digest: str) -> None:
        with open_regular(path) as file:
            while self._size_bytes < size_bytes and (block := file.read(min(_BLOCK_BYTES, size_bytes - self._size_bytes))):
                self._digest.update(block)
                self._size_bytes += len(block)
        if self._size_bytes != size_bytes or self._digest.hexdigest() != digest:
            raise ValueError(f"{path.name} does not hold what was written")

    @property
    def standing(self) -> Standing:
        """Of all that was written, whether it is on the disk yet or not."""
        return self._size_bytes, self._digest.hexdigest()

    def write(self, raw: bytes) -> None:
        """Append."""
        self._file.write(raw)
        self._digest.update(raw)
        self._size_bytes += len(raw)

    def sync(self) -> None:
        """Everything that was written is on the disk when this returns."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close without asking for the disk."""
        self._file.close()
