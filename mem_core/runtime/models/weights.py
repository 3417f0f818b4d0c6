"""Which files hold a folder's weights, and what their headers say. No weight is loaded.

Everything in a model folder was written by somebody else: an index may name files anywhere on the machine, a header may claim any shape.
"""

import math
import os
from pathlib import Path
from typing import Any, cast

from mem_core.domain.errors import RequestError
from mem_core.infrastructure.storage.reading import open_regular, parse_json, read_json, why

Header = dict[str, dict[str, Any]]
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_HEADER_LIMIT_BYTES = 100 * 2**20
_INDEX_LIMIT_BYTES = 100 * 2**20
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8,
         "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64}  # fmt: skip
_AGAIN = "Download the model again"


def is_plain_name(name: object) -> bool:
    """Whether this names a file of the folder itself: no path, nothing above or beside it."""
    return (
        isinstance(name, str) and bool(name) and name not in (".", "..") and not set(name) & set("/\\\0") and len(os.fsencode(name)) < 256
    )


def weight_files(folder: Path, source: str) -> list[Path]:
    """The safetensors files that are loaded, sorted, as transformers chooses them: the one of the usual name, else those of the index.

    Raises:
        RequestError: none, or pickled weights only (loading those can run code), or an index that is damaged, names files outside of
            the folder or files that are not there.
    """
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    if (folder / INDEX_NAME).exists():
        return _indexed_files(folder, source)
    if any(folder.glob("*.safetensors")):
        problem, remedy = f"the folder has no {SINGLE_NAME} and no {INDEX_NAME}", "Give its weights that name, or add the index"
    elif any(any(folder.glob(f"*.{suffix}")) for suffix in ("bin", "pt", "pth")):
        problem = "the folder has pickled weights only, which can run code when loaded"
        remedy = "Convert or download them as safetensors"
    else:
        problem, remedy = "the folder has no weights", "Convert or download them as safetensors"
    raise RequestError(problem, field="model.source", value=source, bound="*.safetensors", remedy=remedy)


def _indexed_files(folder: Path, source: str) -> list[Path]:
    def refused(problem: str, remedy: str = _AGAIN) -> RequestError:
        return RequestError(f"{INDEX_NAME} {problem}", field="model.source", value=source, remedy=remedy)

    try:
        index = read_json(folder / INDEX_NAME, _INDEX_LIMIT_BYTES)
    except (OSError, ValueError) as exc:
        raise refused(f"cannot be read: {why(exc)}") from exc
    weight_map = cast("dict[str, Any]", index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise refused("has no weight_map that names a file for each weight")
    names = list(cast("dict[str, Any]", weight_map).values())
    outside = sorted({repr(name)[:80] for name in names if not is_plain_name(name) or not str(name).endswith(".safetensors")})
    if outside:
        raise refused(f"names what is no file of the folder itself: {', '.join(outside[:5])}", "Only plain names *.safetensors are loaded")
    missing = [name for name in sorted(set(names)) if not (folder / name).is_file()]
    if missing:
        raise RequestError(
            f"weight files are missing: {', '.join(missing[:5])}", field="model.source", value=source, remedy="Download them again"
        )
    if not isinstance(index.get("metadata"), dict):
        raise refused('has no "metadata" mapping, without which transformers does not load it', 'Add "metadata": {} to it')
    return [folder / name for name in sorted(set(names))]


def fingerprinted_files(folder: Path, source: str, loaded: list[Path]) -> list[Path]:
    """What a run's record of its model covers: more than is loaded where a folder holds more. Never changed, since runs resume by it."""
    if not (folder / INDEX_NAME).is_file():
        return sorted(folder.glob("*.safetensors"))
    return _indexed_files(folder, source) if loaded == [folder / SINGLE_NAME] else loaded


def read_safetensors_header(path: Path) -> Header:
    """Tensor name -> {dtype, shape, data_offsets}, checked against the file's length and against each other.

    Raises:
        RequestError: no valid header, or the file is shorter or longer than its header says.
    """
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(size_bytes, _HEADER_LIMIT_BYTES):
                raise ValueError(f"header of {header_bytes} bytes in a file of {size_bytes}")
            header = _checked(parse_json(file.read(header_bytes)))
    except (OSError, ValueError) as exc:
        raise RequestError(
            f"{path.name} is not a safetensors file: {why(exc)}",
            field="model.source",
            value=path,
            remedy=_AGAIN,
        ) from exc
    expected = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if expected != size_bytes or not header:
        raise RequestError(
            f"{path.name} has {size_bytes} bytes where its header asks for {expected}",
            field="model.source",
            value=path,
            remedy="The file is cut short or damaged; download the model again",
        )
    return header


def _checked(content: Any) -> Header:
    """The header, if every entry is what the format says. Raises ValueError."""
    if not isinstance(content, dict):
        raise ValueError("its header is no mapping")
    header = cast("dict[str, Any]", content)
    header.pop("__metadata__", None)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _first_offset(item[1])):
        if not _is_entry(entry) or entry["data_offsets"][0] != end:
            raise ValueError(f"its header describes {name[:100]!r} wrongly")
        end = entry["data_offsets"][1]
    return cast("Header", header)


def _first_offset(entry: Any) -> int:
    offsets = _counts(cast("dict[str, Any]", entry).get("data_offsets")) if isinstance(entry, dict) else None
    return offsets[0] if offsets else -1


def _is_entry(entry: Any) -> bool:
    """Whether shape, number format and place of one tensor agree."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets, bits = _counts(entry.get("shape")), _counts(entry.get("data_offsets")), _BITS.get(entry["dtype"])
    if shape is None or offsets is None or len(offsets) != 2 or offsets[1] < offsets[0]:
        return False
    # A number format that is not listed may be of a later version of the library: then only the library knows its width.
    return bits is None or math.prod(shape) * bits == (offsets[1] - offsets[0]) * 8


def _counts(value: Any) -> list[int] | None:
    """The list, if it holds numbers that can count elements or bytes and nothing else."""
    items = cast("list[Any]", value) if isinstance(value, list) else [None]
    good = all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in items)
    return cast("list[int]", items) if good else None
