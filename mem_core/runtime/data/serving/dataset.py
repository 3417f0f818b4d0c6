"""Read token rows by id. Opening and reading cost the same at any position, and memory does not grow with what was read.

Rows are fetched with `pread` instead of a memory map: pages of a map count as resident memory of the worker and would look
like a leak to whoever watches it, and a file cut short is an error here and not a SIGBUS. The page cache serves both.
"""

import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.errors import DataError
from mem_core.domain.request import DataSection
from mem_core.infrastructure.storage.reading import open_descriptor, open_regular, read_regular
from mem_core.runtime.data.serving.mixing import Samples, samples_of
from mem_core.runtime.data.serving.shards import INDEX_NAME, TokenIndex, expected_sizes, file_digest

Row = tuple[NDArray[np.integer], NDArray[np.uint8] | None]
MOST_HASHED_BYTES = 2**32
_EAGER_BYTES = 2**23
_MOST_INDEX_BYTES = 2**26
_REMEDY = "Remove the folder; it is prepared again from the source files"


class TokenDataset:
    """Rows of one prepared folder; ids are 0 .. len - 1.

    `lengths` and `trained_tokens` are int32 arrays of shape [rows]: tokens, and label positions that count after the shift.
    """

    def __init__(self, folder: Path, index: TokenIndex) -> None:
        self.index = index
        self._width = np.dtype(index.dtype).itemsize
        self._dtype = np.dtype(index.dtype).newbyteorder("<")
        self.lengths: NDArray[np.int32] = _numbers(folder / "lengths.i32", "<i4")
        self.trained_tokens: NDArray[np.int32] = _numbers(folder / "trained.i32", "<i4")
        self._offsets: NDArray[np.int64] = _numbers(folder / "offsets.i64", "<i8")
        self._starts = [0, *accumulate(index.shard_tokens)]
        self._tokens = _descriptors(folder, "tokens", len(index.shard_tokens))
        self._masks = _descriptors(folder, "mask", len(index.shard_tokens)) if index.has_mask else []
        self._close = weakref.finalize(self, _close_all, [*self._tokens, *self._masks])

    @classmethod
    def open(cls, folder: Path | str) -> "TokenDataset":
        """Open a folder that preparation has finished.

        Raises:
            DataError: no index, or files whose sizes do not match it.
        """
        folder = Path(folder)
        return cls(folder, check_folder(folder))

    def __enter__(self) -> "TokenDataset":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.index.num_rows

    def samples(self, data: DataSection) -> Samples:
        """What the order of a request's batches goes over. Raises ValueError: a folder of other sources."""
        return samples_of(data, len(self), self.index.source_rows)

    def rows(self, ids: Iterable[int]) -> list[Row]:
        """Tokens [length] and mask [length] (None when every label counts) of each id, in the order asked for."""
        return [self._row(int(row_id)) for row_id in ids]

    def full_rows(self, ids: Iterable[int], length: int) -> NDArray[np.int64] | None:
        """The quick way for rows that all have exactly `length` tokens and no mask: shape [ids, length]; None when some have not."""
        if self._masks:
            return None
        raw: list[bytes] = []
        size_bytes = length * self._width
        for row_id in ids:
            if self.lengths[row_id] != length:
                return None
            offset = int(self._offsets[row_id])
            shard = bisect_right(self._starts, offset) - 1
            raw.append(_read(self._tokens[shard], size_bytes, (offset - self._starts[shard]) * self._width))
        return np.frombuffer(b"".join(raw), self._dtype).reshape(-1, length).astype(np.int64)

    def close(self) -> None:
        """Close the files; the dataset cannot be read any more."""
        self._close()

    def _row(self, row_id: int) -> Row:
        offset, length = int(self._offsets[row_id]), int(self.lengths[row_id])
        shard = bisect_right(self._starts, offset) - 1
        within = offset - self._starts[shard]
        tokens = np.frombuffer(_read(self._tokens[shard], length * self._width, within * self._width), self._dtype)
        mask = np.frombuffer(_read(self._masks[shard], length, within), np.uint8) if self._masks else None
        return tokens, mask


def check_folder(folder: Path) -> TokenIndex:
    """The index of a complete folder.

    Raises:
        DataError: the index or a file is missing, or a size is not the one that the index gives.
    """
    try:
        index = TokenIndex.model_validate_json(read_regular(folder / INDEX_NAME, _MOST_INDEX_BYTES))
        wrong = [name for name, size in expected_sizes(index).items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError) as exc:
        raise DataError(f"{folder} is not a complete folder of token rows: {exc}", remedy=_REMEDY) from exc
    if wrong:
        raise DataError(f"{folder} is damaged: wrong size of {', '.join(wrong)}", remedy=_REMEDY)
    return index


def check_contents(
    folder: Path, index: TokenIndex, most_bytes: int = MOST_HASHED_BYTES, on_bytes: Callable[[int], None] = lambda size_bytes: None
) -> None:
    """Read every byte again: a disk that turns one token into another would train another model in silence.

    Folders beyond `most_bytes` and those of older versions without digests are left at their sizes, so that a start stays quick.

    Raises:
        DataError: a file is not the one that was written.
    """
    expected = expected_sizes(index)
    if index.digests and index.digests.keys() != expected.keys():
        raise DataError(f"{folder} is damaged: its index names other files than it has", remedy=_REMEDY)
    if sum(expected.values()) > most_bytes:
        return
    wrong: list[str] = []
    for name, digest in index.digests.items():
        if file_digest(folder / name) != digest:
            wrong.append(name)
        on_bytes(expected[name])
    if wrong:
        raise DataError(f"{folder} is damaged: other bytes than were written in {', '.join(wrong)}", remedy=_REMEDY)


def _numbers(path: Path, dtype: str) -> NDArray:
    """Small indexes are read at once, so that resident memory is level from the first batch; large ones are mapped."""
    if path.stat().st_size <= _EAGER_BYTES:
        with open_regular(path) as file:
            return np.frombuffer(bytearray(file.read()), dtype)
    with open_regular(path) as file:
        return np.asarray(np.memmap(file, dtype, mode="r"))


def _descriptors(folder: Path, kind: str, count: int) -> list[int]:
    return [open_descriptor(folder / f"{kind}-{number:05d}.bin") for number in range(count)]


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read(descriptor: int, size_bytes: int, offset_bytes: int) -> bytes:
    raw = os.pread(descriptor, size_bytes, offset_bytes)
    if len(raw) != size_bytes:
        raise DataError(f"a token shard ends {size_bytes - len(raw)} bytes early", remedy=_REMEDY)
    return raw
