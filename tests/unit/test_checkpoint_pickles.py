"""Pickles that name nothing but what training state needs and are hostile all the same: what is done with a name counts too."""

import collections
import io
import pickle
from typing import Any

import pytest

from mem_core.domain.checkpoint import FileEntry
from mem_core.runtime.checkpoint_manager.inspection.pickle_scan import DEFAULT_ALLOWED_GLOBALS, scan_pickle

HEAD = b"\x80\x02"
SCALER = b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n"
ORDERED = b"ccollections\nOrderedDict\n"
DICT = b"}X\x01\x00\x00\x00xK\x01s"  # {"x": 1}


def program(*parts: bytes) -> bytes:
    return HEAD + b"".join(parts) + b"."


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        pytest.param((SCALER, DICT, b"b"), "opcode BUILD on a class", id="a class is written into"),
        pytest.param((SCALER, b"q\x000h\x00", DICT, b"b"), "opcode BUILD on a class", id="the same through the memo"),
        pytest.param((SCALER, b")\x81", b"}N\x86", b"b"), "opcode BUILD with tuple for state", id="attributes one by one"),
        pytest.param((DICT, DICT, b"b"), "opcode BUILD on dict", id="a dict is built"),
        pytest.param((SCALER, b")\x81", b")R"), "opcode REDUCE calls an object", id="what was made is called"),
        pytest.param((b"X\x01\x00\x00\x00x", b")R"), "opcode REDUCE calls a plain value", id="a text is called"),
        pytest.param((ORDERED, b"]R"), "opcode REDUCE with list for arguments", id="arguments that are no tuple"),
        pytest.param((SCALER, b"K\x01a"), "opcode APPEND on a class", id="a class is appended to"),
        pytest.param((SCALER, b")\x81", b"K\x01a"), "opcode APPEND on an object", id="an object is appended to"),
        pytest.param((SCALER, b"K\x01K\x02s"), "opcode SETITEM on a class", id="a class gets an item"),
        pytest.param((b"]K\x01K\x02s",), "opcode SETITEM on list", id="a list gets an item"),
        pytest.param((b"b",), "not a readable pickle", id="nothing there"),
        pytest.param((b"K\x01u",), "not a readable pickle", id="no mark"),
        pytest.param((b"h\x07",), "not a readable pickle", id="never put there"),
        pytest.param((b"\x8c\x02os\x8c\x06system\x93",), "opcode SHORT_BINUNICODE", id="names from the stack"),
    ],
)  # fmt: skip
def test_what_training_state_never_does_is_refused(parts: tuple[bytes, ...], reason: str) -> None:
    assert reason in "; ".join(scan_pickle(program(*parts)))


class Named(pickle._Pickler):  # type: ignore[name-defined] - the one that can be taught other names
    """Pickles stand-ins under the names of what they stand for."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        module, _, attribute = obj.stands_for.rpartition(".") if hasattr(obj, "stands_for") else (obj.__module__, "", obj.__qualname__)
        self.write(f"c{module}\n{attribute}\n".encode())
        self.memoize(obj)

    dispatch = pickle._Pickler.dispatch | {type: save_global}  # type: ignore[attr-defined]


class LossScaler:
    """As DeepSpeed writes it: an object with a dictionary."""

    stands_for = "deepspeed.runtime.fp16.loss_scaler.LossScaler"

    def __init__(self) -> None:
        self.cur_scale, self.raise_error_at_min_scale = 1.0, True


def test_what_training_state_does_is_accepted() -> None:
    """Objects with a dictionary, ordered dictionaries with attributes (torch's state_dict has some), the same class twice by the memo."""
    ordered: Any = collections.OrderedDict(a=[1, 2.5, None, True], b=(1, (2, 3), {"c": "text"}, 1 << 40))
    ordered._metadata = {"": {"version": 1}}
    stream = io.BytesIO()
    Named(stream, protocol=2).dump({"module": ordered, "again": collections.OrderedDict(), "scalers": [LossScaler(), LossScaler()]})
    assert scan_pickle(stream.getvalue()) == ()
    assert "names" in scan_pickle(stream.getvalue(), DEFAULT_ALLOWED_GLOBALS - {LossScaler.stands_for})[0]


@pytest.mark.parametrize("path", ["./x", "a//b", "a/./b", "a/", "/a", "../a", "a/..", "", ".", "a\\b", "manifest.json", "aside.json"])
def test_a_file_of_a_manifest_has_one_plain_name(path: str) -> None:
    """`./x` is a second name of `x`: a list of names would not see that one file stands in it twice."""
    with pytest.raises(ValueError, match="must be relative, plain"):
        FileEntry(path=path, size_bytes=1, sha256="0" * 64)
    assert FileEntry(path="a/b.pt", size_bytes=1, sha256="0" * 64).path == "a/b.pt"
