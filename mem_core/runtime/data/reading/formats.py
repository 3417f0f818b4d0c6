"""Files that are not what they are read as, known by their first bytes and called by name. Pure."""

from dataclasses import dataclass

HEAD_BYTES = 512
_UNPACK = "Unpack it with {}"
_EXPORT = "Write its rows as JSONL, one JSON object a line"
_MAGICS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "gzip-compressed", _UNPACK.format("gunzip")),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", _UNPACK.format("unzstd")),
    (b"\xfd7zXZ\x00", "xz-compressed", _UNPACK.format("unxz")),
    (b"\x04\x22\x4d\x18", "lz4-compressed", _UNPACK.format("unlz4")),
    (b"PK\x03\x04", "a zip archive", _UNPACK.format("unzip")),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK.format("7z x")),
    (b"ARROW1\x00\x00", "an Arrow file", _EXPORT),
    (b"SQLite format 3\x00", "an SQLite database", _EXPORT),
    (b"%PDF-", "a PDF document", "Extract its text first"),
)
_CONVERT = "Convert it: iconv -f {} -t UTF-8"
_MARKS = ((b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a file is instead, and what to do about it."""

    what: str
    remedy: str
    packed: bool = False


def foreign_format(head: bytes) -> Foreign | None:
    """What a file that begins with these bytes is, where it is no UTF-8 text; None where it may be."""
    for magic, what, remedy in _MAGICS:
        if head.startswith(magic):
            return Foreign(what, remedy, packed=True)
    if head.startswith(b"PAR1") and b"\0" in head:
        return Foreign("a Parquet file", _EXPORT, packed=True)
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return Foreign("bzip2-compressed", _UNPACK.format("bunzip2"), packed=True)
    if head[257:262] == b"ustar":
        return Foreign("a tar archive", _UNPACK.format("tar -x"), packed=True)
    encoding = next((name for mark, name in _MARKS if head.startswith(mark)), None) or _wide_text(head)
    return Foreign(f"{encoding} text", _CONVERT.format(encoding)) if encoding else None


def _wide_text(head: bytes) -> str | None:
    """UTF-16 without a mark: in what people write, nearly every other byte is zero."""
    even, odd = head[: HEAD_BYTES // 2 * 2 : 2], head[1:HEAD_BYTES:2]
    if len(odd) < 4:
        return None
    for zeros, letters, name in ((odd, even, "UTF-16LE"), (even, odd, "UTF-16BE")):
        if zeros.count(0) > 0.7 * len(zeros) and letters.count(0) < 0.1 * len(letters):
            return name
    return None
