"""Proves a torch file safe to unpickle without unpickling it.

`torch.save` writes a zip whose `data.pkl` is a pickle program. A pickle runs code only through the callables that it names, so the scan
allows the few names that training state needs, the few opcodes that torch writes, and the archive members that torch writes. DeepSpeed
loads with `weights_only=False`; this scan is what stands between a hostile file and that call. Everything not listed is refused:
`STACK_GLOBAL` takes its names from the stack, `INST` and `OBJ` call, `EXT*` look up a registry, a `constants.pkl` makes torch run
TorchScript, compressed members could be bombs, and two members of one name can be read differently by two zip readers.
"""

import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any, Literal

from mem_core.infrastructure.storage.reading import open_regular

_TENSOR_REBUILDERS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")
_STORAGES = ("Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double", "Bool", "BFloat16")
_TORCH_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
TORCH_GLOBALS = frozenset(
    {"collections.OrderedDict", "torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter",
     "torch._tensor._rebuild_from_type_v2", "torch.storage.UntypedStorage", "torch.serialization._get_layout"}
    | {f"torch._utils.{name}" for name in _TENSOR_REBUILDERS}
    | {f"torch.{name}Storage" for name in _STORAGES}
    | {f"torch.{name}" for name in _TORCH_DTYPES}
)  # fmt: skip
ENGINE_GLOBALS = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
DEFAULT_ALLOWED_GLOBALS = TORCH_GLOBALS | ENGINE_GLOBALS
_ALLOWED_OPCODES = frozenset(
    {
        "PROTO",
        "STOP",
        "MARK",
        "GLOBAL",
        "REDUCE",
        "NEWOBJ",
        "BUILD",
        "BINPERSID",
        "APPEND",
        "APPENDS",
        "SETITEM",
        "SETITEMS",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "EMPTY_TUPLE",
        "EMPTY_LIST",
        "EMPTY_DICT",
        "EMPTY_SET",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINSTRING",
        "BINGET",
        "LONG_BINGET",
        "BINPUT",
        "LONG_BINPUT",
    }
)
_MEMBER = re.compile(r"^(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)$")
_PROTOCOL = 2
_MAX_PICKLE_BYTES = 256 << 20
_MAX_LISTED = 5


def scan_torch_file(path: Path, allowed_globals: frozenset[str] = DEFAULT_ALLOWED_GLOBALS) -> tuple[str, ...]:
    """Reasons why this file must not be loaded; empty if it is a plain torch archive whose pickle names only what is allowed.

    Executes nothing of the file and never raises on hostile input.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            reasons = _check_members(archive)
            if reasons:
                return reasons
            pickled = next(info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            if pickled.file_size > _MAX_PICKLE_BYTES:
                return (f"its pickle has {pickled.file_size} bytes, more than {_MAX_PICKLE_BYTES}",)
            return scan_pickle(archive.read(pickled), allowed_globals)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, RuntimeError, OverflowError) as exc:
        return (f"not a readable torch archive ({type(exc).__name__}: {str(exc)[:100]})",)


def _check_members(archive: zipfile.ZipFile) -> tuple[str, ...]:
    infos = archive.infolist()
    names = [info.filename for info in infos]
    roots = {name.split("/", 1)[0] for name in names}
    if not infos or len(roots) != 1:
        return ("not a torch archive: it does not hold exactly one folder",)
    inner = [name.split("/", 1)[1] if "/" in name else "" for name in names]
    reasons: list[str] = []
    strangers = [name for name in inner if not _MEMBER.match(name)]
    if strangers:
        reasons.append(f"members that torch.save does not write: {strangers[:_MAX_LISTED]}")
    if len(set(names)) != len(names):
        reasons.append("two members of one name")
    if "data.pkl" not in inner:
        reasons.append("no data.pkl")
    if any(info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1 for info in infos):
        reasons.append("compressed or encrypted members")
    if min(info.header_offset for info in infos) != 0 or archive.comment:
        reasons.append("bytes before or after the archive")
    return tuple(reasons)


def scan_pickle(program: bytes, allowed_globals: frozenset[str] = DEFAULT_ALLOWED_GLOBALS) -> tuple[str, ...]:
    """Reasons why this pickle must not be run; each names the opcode or the callable and its offset."""
    reasons: list[str] = []
    end = -1
    stack = _Stack()
    try:
        for opcode, argument, position in pickletools.genops(program):
            if len(reasons) >= _MAX_LISTED:
                break
            if opcode.name not in _ALLOWED_OPCODES:
                reasons.append(f"opcode {opcode.name} at byte {position}")
            elif opcode.name == "GLOBAL":
                name = str(argument).replace(" ", ".", 1)
                if name not in allowed_globals:
                    reasons.append(f"names {name[:100]} at byte {position}")
            elif opcode.name == "PROTO" and argument != _PROTOCOL:
                reasons.append(f"pickle protocol {argument}, torch.save writes {_PROTOCOL}")
            elif opcode.name == "STOP":
                end = (position or 0) + 1
            if not reasons and not stack.follow(opcode.name, argument):
                reasons.append(f"{opcode.name} at byte {position} on what it is not for")
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as exc:
        reasons.append(f"not a readable pickle ({type(exc).__name__})")
    if not reasons and end != len(program):
        reasons.append("bytes after the end of the pickle")
    return tuple(reasons)


# What stands on the stack, as far as it matters: a name that was looked up (class or function), what a call made of one, tuples, the rest.
_Kind = Literal["named", "made", "tuple", "plain", "mark"]
# Opcode -> how many it takes off and what it puts on. "to mark" are those that take all down to the last mark.
_FIXED: dict[str, tuple[int, _Kind | None]] = {
    "PROTO": (0, None), "STOP": (1, None), "MARK": (0, "mark"), "GLOBAL": (0, "named"), "BINPERSID": (1, "made"),
    "TUPLE1": (1, "tuple"), "TUPLE2": (2, "tuple"), "TUPLE3": (3, "tuple"), "EMPTY_TUPLE": (0, "tuple"),
}  # fmt: skip
_TO_MARK = frozenset({"TUPLE", "APPENDS", "SETITEMS"})


class _Stack:
    """Runs a pickle's opcodes on kinds instead of values.

    A name by itself is harmless; what is done to it may not be. `BUILD` on a class sets attributes of that class for the whole
    process, so that a file could change how everything is loaded after it; the unpickler of `weights_only` refuses that, DeepSpeed's
    own loading does not.
    """

    def __init__(self) -> None:
        self._items: list[_Kind] = []
        self._memo: dict[int, _Kind] = {}

    def follow(self, opcode: str, argument: Any) -> bool:
        """Whether this may be done here. Raises IndexError or KeyError where the stack or the memo has nothing to do it to."""
        match opcode:
            case "BINPUT" | "LONG_BINPUT":
                self._memo[int(argument)] = self._items[-1]
            case "BINGET" | "LONG_BINGET":
                self._items.append(self._memo[int(argument)])
            case "REDUCE" | "NEWOBJ":
                self._items.pop()
                if self._items.pop() != "named":
                    return False
                self._items.append("made")
            case "BUILD":  # a state that is a tuple sets attributes one by one, `__class__` among them
                return self._items.pop() != "tuple" and self._items[-1] == "made"
            case "APPEND" | "SETITEM":
                del self._items[-1 if opcode == "APPEND" else -2 :]
                return self._items[-1] in ("made", "plain")
            case _ if opcode in _TO_MARK:
                while self._items.pop() != "mark":
                    pass
                if opcode == "TUPLE":
                    self._items.append("tuple")
                    return True
                return self._items[-1] in ("made", "plain")
            case _:
                takes, puts = _FIXED.get(opcode, (0, "plain"))
                for _ in range(takes):
                    self._items.pop()
                if puts is not None:
                    self._items.append(puts)
        return True
