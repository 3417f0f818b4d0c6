"""Proves a torch file safe to unpickle without unpickling it.

`torch.save` writes a zip whose `data.pkl` is a pickle program. A pickle runs code only through the callables that it names, so the scan
allows the few names that training state needs, the few opcodes that torch writes, each where it does what torch does with it
(`pickle_stack`), and the archive members that torch writes. DeepSpeed loads with `weights_only=False`; this scan is what stands between
a hostile file and that call. Everything not listed is refused: `STACK_GLOBAL` takes its names from the stack, `INST` and `OBJ` call,
`EXT*` look up a registry, a `constants.pkl` makes torch run TorchScript, compressed members could be bombs, and two members of one name
can be read differently by two zip readers.
"""

import pickletools
import re
import zipfile
from pathlib import Path

from mem_core.runtime.checkpoint_manager.inspection.pickle_stack import PickleStack

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
        with zipfile.ZipFile(path) as archive:
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


def _reason_against(opcode: str, argument: object, allowed_globals: frozenset[str]) -> str:
    """Why an opcode is refused wherever it stands."""
    if opcode not in _ALLOWED_OPCODES:
        return f"opcode {opcode}"
    if opcode == "GLOBAL":
        name = str(argument).replace(" ", ".", 1)
        return "" if name in allowed_globals else f"names {name[:100]}"
    if opcode == "PROTO" and argument != _PROTOCOL:
        return f"pickle protocol {argument}, torch.save writes {_PROTOCOL},"
    return ""


def scan_pickle(program: bytes, allowed_globals: frozenset[str] = DEFAULT_ALLOWED_GLOBALS) -> tuple[str, ...]:
    """Reasons why this pickle must not be run; each names the opcode or the callable and its offset."""
    reasons: list[str] = []
    end = -1
    stack = PickleStack()
    try:
        for opcode, argument, position in pickletools.genops(program):
            reason = _reason_against(opcode.name, argument, allowed_globals)
            if reason:
                reasons.append(f"{reason} at byte {position}")
            if len(reasons) >= _MAX_LISTED or (reason and opcode.name not in _ALLOWED_OPCODES):
                break  # what an unknown opcode leaves on the stack is not known either
            odd = stack.take(opcode.name, argument)
            if odd:
                reasons.append(f"opcode {opcode.name} {odd} at byte {position}")
            if opcode.name == "STOP":
                end = (position or 0) + 1
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, OverflowError) as exc:
        reasons.append(f"not a readable pickle ({type(exc).__name__})")
    if not reasons and end != len(program):
        reasons.append("bytes after the end of the pickle")
    return tuple(reasons)
