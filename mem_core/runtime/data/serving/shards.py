"""The on-disk form of token rows: a folder with token shards and an index. Version 1.

    index.json            TokenIndex
    tokens-00000.bin ...  unsigned 16- or 32-bit little-endian tokens; a row never straddles shards
    mask-00000.bin ...    one byte per token: 1 where its label counts, 2 where a document begins that sees none before it;
                          only where there is something to say
    lengths.i32  trained.i32  offsets.i64   one number per row; offsets count tokens over all shards

Numbers are appended while rows are written, so that memory does not grow with the data.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.units import Value
from mem_core.infrastructure.storage.reading import open_regular
from mem_core.runtime.data.serving.growing import GrowingFile, Standing

SHARD_TOKENS = 2**26
COUNTS, BEGINS_DOCUMENT = 1, 2
INDEX_NAME = "index.json"


class TokenIndex(Value):
    """What a folder of token rows holds."""

    format_version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    shard_tokens: tuple[int, ...]
    has_mask: bool
    documents_apart: bool = False  # rows of several documents, of which none sees another
    num_rows: int
    num_tokens: int
    trained_tokens: int
    longest_tokens: int
    max_token_id: int
    source_rows: tuple[int, ...] = ()  # of weighted sources, whose rows follow each other
    digests: dict[str, str] = {}  # SHA-256 of each file beside the index; empty in folders of older versions


_PER_ROW = ("lengths.i32", "trained.i32", "offsets.i64")


class ShardWriter:
    """Writes rows in order. `finish` makes them durable; before it the folder has no index and is no dataset.

    `standing` is what `state` gave to an earlier writer of the same folder, which may have died since: whatever it wrote after that is
    taken away again.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        has_mask: bool,
        shard_tokens: int = SHARD_TOKENS,
        *,
        documents_apart: bool = False,
        standing: dict[str, Any] | None = None,
    ) -> None:
        """Raises OSError; ValueError where the folder does not hold what `standing` says."""
        self._folder = folder
        self._apart = documents_apart
        self._dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
        self._has_mask = has_mask
        self._limit = shard_tokens
        self._shards: list[int] = []
        self._full: dict[str, Standing] = {}  # files that no more is written to
        self._num_rows = self._num_tokens = self._trained = self._longest = self._max_id = 0
        if standing is None:
            folder.mkdir(parents=True)
            self._files = {name: GrowingFile(folder / name) for name in _PER_ROW}
        else:
            self._files = self._taken_up(standing)

    def _taken_up(self, state: dict[str, Any]) -> dict[str, GrowingFile]:
        self._shards = [int(tokens) for tokens in state["shards"]]
        self._num_rows, self._num_tokens, self._trained, self._longest, self._max_id = (int(number) for number in state["numbers"])
        files: dict[str, GrowingFile] = {}
        try:
            for name, (size_bytes, digest) in state["files"].items():
                files[name] = GrowingFile(self._folder / name, (int(size_bytes), str(digest)))
        except (OSError, ValueError):
            for file in files.values():
                file.close()
            raise
        for path in self._folder.iterdir():
            if path.name not in files:
                path.unlink()
        growing = {*_PER_ROW, *(name for name in self._shard_names() if self._shards)}
        for name in files.keys() - growing:
            self._full[name] = files[name].standing
            files.pop(name).close()
        return files

    def _shard_names(self) -> tuple[str, ...]:
        """The files of the last shard."""
        number = len(self._shards) - 1
        return (f"tokens-{number:05d}.bin", *((f"mask-{number:05d}.bin",) if self._has_mask else ()))

    def state(self) -> dict[str, Any]:
        """How far this writer is; all of it is on the disk when this returns."""
        for file in self._files.values():
            file.sync()
        files = {**self._full, **{name: file.standing for name, file in self._files.items()}}
        numbers = [self._num_rows, self._num_tokens, self._trained, self._longest, self._max_id]
        return {"shards": list(self._shards), "numbers": numbers, "files": {name: list(standing) for name, standing in files.items()}}

    @property
    def num_rows(self) -> int:
        """Rows written so far."""
        return self._num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._num_tokens

    def write(self, tokens: NDArray[np.integer], lengths: NDArray[np.int64], mask: NDArray[np.uint8] | None) -> None:
        """Append rows that lie end to end in `tokens` (and `mask`), shape [sum(lengths)]; `lengths` has one entry a row.

        Raises:
            ValueError: a mask where none was announced, or the other way round, or lengths that do not add up.
        """
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        if (mask is not None) != self._has_mask or bounds[-1] != tokens.size:
            raise ValueError(
                f"mask given: {mask is not None}, announced: {self._has_mask}; {bounds[-1]} tokens announced, {tokens.size} given"
            )
        start = 0
        while start < len(lengths):
            used = self._shards[-1] if self._shards else self._limit
            stop = int(np.searchsorted(bounds, bounds[start] + self._limit - used, side="right")) - 1
            if stop <= start:
                self._open_shard()
                stop = max(start + 1, int(np.searchsorted(bounds, bounds[start] + self._limit, side="right")) - 1)
            part = slice(int(bounds[start]), int(bounds[stop]))
            self._write_part(tokens[part], lengths[start:stop], None if mask is None else mask[part])
            start = stop

    def _write_part(self, tokens: NDArray[np.integer], lengths: NDArray[np.int64], mask: NDArray[np.uint8] | None) -> None:
        tokens_name, *mask_name = self._shard_names()
        self._files[tokens_name].write(tokens.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes())
        if mask is not None:
            self._files[mask_name[0]].write(mask.astype(np.uint8).tobytes())
        trained = trained_labels(lengths, mask)
        offsets = self._num_tokens + np.cumsum(lengths) - lengths
        self._files["lengths.i32"].write(lengths.astype("<i4").tobytes())
        self._files["trained.i32"].write(trained.astype("<i4").tobytes())
        self._files["offsets.i64"].write(offsets.astype("<i8").tobytes())
        self._shards[-1] += tokens.size
        self._num_rows += len(lengths)
        self._num_tokens += tokens.size
        self._trained += int(trained.sum())
        self._longest = max(self._longest, int(lengths.max()))
        self._max_id = max(self._max_id, int(tokens.max()))

    def _open_shard(self) -> None:
        for name in self._shard_names() if self._shards else ():
            file = self._files.pop(name)
            file.sync()
            file.close()
            self._full[name] = file.standing
        self._shards.append(0)
        self._files |= {name: GrowingFile(self._folder / name) for name in self._shard_names()}

    def finish(self, source_rows: tuple[int, ...] = ()) -> TokenIndex:
        """Flush to disk, write the index last, return it. `source_rows`: see `TokenIndex`."""
        for file in self._files.values():
            file.sync()
            file.close()
        index = TokenIndex(
            dtype=self._dtype,
            shard_tokens=tuple(self._shards),
            has_mask=self._has_mask,
            documents_apart=self._apart,
            source_rows=source_rows,
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            trained_tokens=self._trained,
            longest_tokens=self._longest,
            max_token_id=self._max_id,
        )
        written = {**self._full, **{name: file.standing for name, file in self._files.items()}}
        index = index.model_copy(update={"digests": {name: written[name][1] for name in expected_sizes(index)}})
        with (self._folder / INDEX_NAME).open("wb") as file:
            file.write(index.model_dump_json().encode())
            close_durably(file)
        return index

    def close(self) -> None:
        """Close the files without making a dataset, after an error."""
        for file in self._files.values():
            file.close()


def trained_labels(lengths: NDArray[np.int64], mask: NDArray[np.uint8] | None) -> NDArray[np.int64]:
    """Label positions that count in each row after the shift, shape [rows]: a row's first token is never predicted."""
    if mask is None:
        return lengths - 1
    counted = np.concatenate(([0], np.cumsum(mask & COUNTS, dtype=np.int64)))
    stops = np.cumsum(lengths)
    starts = stops - lengths
    return counted[stops] - counted[np.minimum(starts + 1, stops)]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in pieces. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def close_durably(file: BinaryIO) -> None:
    """Flush, fsync, close."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def expected_sizes(index: TokenIndex) -> dict[str, int]:
    """File name -> bytes that a complete folder has, for a cheap check before it is trusted."""
    width = np.dtype(index.dtype).itemsize
    sizes = {"lengths.i32": 4 * index.num_rows, "trained.i32": 4 * index.num_rows, "offsets.i64": 8 * index.num_rows}
    for number, tokens in enumerate(index.shard_tokens):
        sizes[f"tokens-{number:05d}.bin"] = width * tokens
        if index.has_mask:
            sizes[f"mask-{number:05d}.bin"] = tokens
    return sizes
