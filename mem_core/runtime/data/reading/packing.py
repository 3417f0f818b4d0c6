"""Compressed files, known by their first bytes and read as what is in them. Pure but for reading the stream it is handed."""

import bz2
import gzip
import io
import lzma
import zlib
from typing import Any, BinaryIO, Literal, cast

Packing = Literal["", "gzip", "zstd", "bzip2", "xz"]
PACKED_SUFFIXES: dict[str, Packing] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bzip2", ".xz": "xz"}
# What a damaged or hostile file can make its reader raise; a cut one ends too early. No ValueError: what is wrong with rows is one.
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError)
_BUFFER_BYTES = 2**20
# The largest window of zstd's levels, which a frame may ask its reader to hold; only --long=28 and more asks for others.
_MOST_WINDOW_BYTES = 2**27
# So little at once, since a block of a zstd frame can be 128 KiB of one byte in four: a hostile file costs 128 MiB and not all memory.
_INPUT_BYTES = 4_096


def packing_of(head: bytes) -> Packing:
    """How a file that begins with these bytes is compressed; empty where it is not."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return "zstd"
    if head.startswith(b"\xfd7zXZ\x00"):
        return "xz"
    return "bzip2" if head.startswith(b"BZh") and head[4:10] == b"1AY&SY" else ""


def unpacked(stream: BinaryIO, packing: Packing) -> BinaryIO:
    """What is in the stream. Reading it raises one of `DAMAGED` where the stream is cut or is not what it was taken for."""
    if not packing:
        return stream
    if packing == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb"))
    if packing == "bzip2":
        return cast(BinaryIO, bz2.BZ2File(stream, "rb"))
    if packing == "xz":
        return cast(BinaryIO, lzma.LZMAFile(stream, "rb"))
    return cast(BinaryIO, io.BufferedReader(_Zstd(stream), _BUFFER_BYTES))


class _Zstd(io.RawIOBase):
    """A zstd stream of one or more frames, whose end in the middle of a frame is an error: the library takes it for the end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._frame: Any = None
        self._waiting = b""
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """To its beginning alone."""
        return True

    def tell(self) -> int:
        """How far it was read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go back to the beginning. Raises OSError for any other place."""
        if whence == io.SEEK_SET and offset == 0:
            self._stream.seek(0)
            self._frame, self._waiting, self._position = None, b"", 0
        elif (whence, offset) != (io.SEEK_CUR, 0) and (whence, offset) != (io.SEEK_SET, self._position):
            raise io.UnsupportedOperation("only to the beginning")
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with what comes next."""
        import zstandard

        while not self._waiting:
            block = self._stream.read(_INPUT_BYTES)
            if not block:
                if self._frame is not None:
                    raise EOFError("the compressed stream ends in the middle")
                return 0
            try:
                self._waiting = self._out_of(block)
            except zstandard.ZstdError as exc:
                raise OSError(str(exc)) from exc
        size = min(len(buffer), len(self._waiting))
        buffer[:size] = self._waiting[:size]
        self._waiting = self._waiting[size:]
        self._position += size
        return size

    def _out_of(self, block: bytes) -> bytes:
        import zstandard

        parts: list[bytes] = []
        while block:
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES).decompressobj()
            parts.append(self._frame.decompress(block))
            block = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        return b"".join(parts)
