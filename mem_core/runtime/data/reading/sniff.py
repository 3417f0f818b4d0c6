"""A first look at the data: are the files there, readable, and what their names say. The row-by-row check is the preparer's."""

import json
from collections.abc import Iterable
from itertools import chain

from mem_core.domain.environment import DataFile, DataNumbers
from mem_core.domain.errors import MemError, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.storage.reading import open_regular

_SNIFF_BYTES = 64 * 1024
_MAGICS = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


def sniff_data(request: RuntimeRequest) -> DataNumbers:
    """Resolve `data.train` and `data.validation` and read the first bytes of every file."""
    from mem_core.runtime.data.reading.sources import resolve_files

    lists: list[tuple[str, Iterable[str]]] = [("data.train", request.data.train)]
    if isinstance(request.data.validation, tuple):
        lists.append(("data.validation", request.data.validation))
    files: list[DataFile] = []
    problems: list[str] = []
    parquet: list[str] = []
    for field, source in chain.from_iterable(((name, source) for source in sources) for name, sources in lists):
        try:
            for found in resolve_files([source], request.data.format, field):
                problem = "" if found.is_remote else sniff_file(found.path, found.kind)
                files.append(DataFile(path=found.path, size_bytes=found.size_bytes, problem=problem))
        except RequestError as exc:
            parquet.append(exc.value or source)
        except MemError as exc:
            problems.append(f"{field} {source}: {exc.problem}")
    return DataNumbers(files=tuple(files), problems=tuple(problems), parquet=tuple(parquet))


def sniff_file(path: str, kind: str) -> str:
    """Why the first bytes cannot be rows of this kind ("text", "jsonl"); empty when they can."""
    try:
        with open_regular(path) as file:
            head = file.read(_SNIFF_BYTES)
    except OSError as exc:
        return exc.strerror or str(exc)
    packed = next((name for magic, name in _MAGICS.items() if head.startswith(magic)), None)
    if packed is not None:
        return f"the file is {packed}-compressed; unpack it first"
    problem = _text_problem(head)
    if problem or kind != "jsonl":
        return problem
    return _jsonl_problem(head)


def _text_problem(head: bytes) -> str:
    if b"\0" in head:
        return f"not text: byte {head.index(0)} is NUL"
    try:
        head.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        cut_by_us = len(head) == _SNIFF_BYTES and exc.start >= len(head) - 3 and exc.reason == "unexpected end of data"
        if not cut_by_us:
            return f"not UTF-8: byte 0x{head[exc.start]:02x} at offset {exc.start}, line {head.count(10, 0, exc.start) + 1}"
    return ""


def _jsonl_problem(head: bytes) -> str:
    for number, line in enumerate(head.split(b"\n"), start=1):
        complete = number <= head.count(b"\n") or len(head) < _SNIFF_BYTES
        if not line.strip() or not complete:
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as exc:
            return f"line {number} is not JSON: {exc}"
        return "" if isinstance(row, dict) else f"line {number} is a JSON {type(row).__name__}, not an object"
    return ""
