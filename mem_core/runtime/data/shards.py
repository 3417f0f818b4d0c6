"""The on-disk form of token rows: a folder with token shards and an index. Version 1.

    index.json            TokenIndex
    tokens-00000.bin ...  unsigned 16- or 32-bit little-endian tokens; a row never straddles shards
    mask-00000.bin ...    one byte per token, 1 where its label counts; only when some label does not
    lengths.i32  trained.i32  offsets.i64   one number per row; offsets count tokens over all shards

Numbers are appended while rows are written, so that memory does not grow with the data.
"""

import os
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.units import Value

SHARD_TOKENS = 2**26
INDEX_NAME = "index.json"


class TokenIndex(Value):
    """What a folder of token rows holds."""

    format_version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    shard_tokens: tuple[int, ...]
    has_mask: bool
    num_rows: int
    num_tokens: int
    trained_tokens: int
    longest_tokens: int
    max_token_id: int


class ShardWriter:
    """Writes rows in order. `finish` makes them durable; before it the folder has no index and is no dataset."""

    def __init__(self, folder: Path, vocab_size: int, has_mask: bool, shard_tokens: int = SHARD_TOKENS) -> None:
        self._folder = folder
        self._dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
        self._has_mask = has_mask
        self._limit = shard_tokens
        self._shards: list[int] = []
        self._tokens_file: BinaryIO | None = None
        self._mask_file: BinaryIO | None = None
        self._num_rows = self._num_tokens = self._trained = self._longest = self._max_id = 0
        folder.mkdir(parents=True)
        self._index_files = {name: (folder / name).open("wb") for name in ("lengths.i32", "trained.i32", "offsets.i64")}

    @property
    def num_rows(self) -> int:
        """Rows written so far."""
        return self._num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._num_tokens

    def write(self, tokens: NDArray[np.integer], mask: NDArray[np.uint8] | None) -> None:
        """Append rows of equal length. Shape [rows, length] of both; every row has at least one label that counts.

        Raises:
            ValueError: a mask where none was announced, or the other way round.
        """
        if (mask is not None) != self._has_mask:
            raise ValueError(f"mask given: {mask is not None}, announced: {self._has_mask}")
        rows, length = tokens.shape
        if not rows:
            return
        per_shard = max(1, self._limit // length)
        for start in range(0, rows, per_shard):
            part = slice(start, start + per_shard)
            self._write_part(tokens[part], None if mask is None else mask[part])

    def _write_part(self, tokens: NDArray[np.integer], mask: NDArray[np.uint8] | None) -> None:
        rows, length = tokens.shape
        if self._tokens_file is None or self._shards[-1] + tokens.size > self._limit:
            self._open_shard()
        assert self._tokens_file is not None
        self._tokens_file.write(tokens.astype(f"<{np.dtype(self._dtype).str[1:]}").tobytes())
        if mask is not None and self._mask_file is not None:
            self._mask_file.write(mask.astype(np.uint8).tobytes())
        trained = np.full(rows, length - 1) if mask is None else mask[:, 1:].sum(axis=1, dtype=np.int64)
        self._index_files["lengths.i32"].write(np.full(rows, length, dtype="<i4").tobytes())
        self._index_files["trained.i32"].write(trained.astype("<i4").tobytes())
        self._index_files["offsets.i64"].write((self._num_tokens + length * np.arange(rows, dtype="<i8")).tobytes())
        self._shards[-1] += tokens.size
        self._num_rows += rows
        self._num_tokens += tokens.size
        self._trained += int(trained.sum())
        self._longest = max(self._longest, length)
        self._max_id = max(self._max_id, int(tokens.max()))

    def _open_shard(self) -> None:
        for file in (self._tokens_file, self._mask_file):
            if file is not None:
                close_durably(file)
        number = len(self._shards)
        self._tokens_file = (self._folder / f"tokens-{number:05d}.bin").open("wb")
        self._mask_file = (self._folder / f"mask-{number:05d}.bin").open("wb") if self._has_mask else None
        self._shards.append(0)

    def finish(self) -> TokenIndex:
        """Flush to disk, write the index last, return it."""
        for file in (self._tokens_file, self._mask_file, *self._index_files.values()):
            if file is not None:
                close_durably(file)
        index = TokenIndex(
            dtype=self._dtype,
            shard_tokens=tuple(self._shards),
            has_mask=self._has_mask,
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            trained_tokens=self._trained,
            longest_tokens=self._longest,
            max_token_id=self._max_id,
        )
        with (self._folder / INDEX_NAME).open("wb") as file:
            file.write(index.model_dump_json().encode())
            close_durably(file)
        return index

    def close(self) -> None:
        """Close the files without making a dataset, after an error."""
        for file in (self._tokens_file, self._mask_file, *self._index_files.values()):
            if file is not None:
                file.close()


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
