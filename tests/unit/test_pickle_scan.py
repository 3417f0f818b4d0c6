"""The scan of a pickle before it is loaded: what training state needs passes, what touches a class or calls anything else does not."""

import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest

from mem_core.domain.checkpoint import FileEntry
from mem_core.runtime.checkpoint_manager.inspection.pickle_scan import scan_pickle

PROTO, STOP = b"\x80\x02", b"."


def name(dotted: str) -> bytes:
    """GLOBAL: looks a name up."""
    module, _, attribute = dotted.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


ORDERED = name("collections.OrderedDict")
CLASS_STATE = b"N}" + text("items") + text("poisoned") + b"s\x86"  # (None, {"items": "poisoned"}): set as attributes of what is built


@pytest.mark.parametrize(
    "state",
    [{}, {"a": [1, 2.5, None, True, (1, 2), ()]}, OrderedDict(a=OrderedDict(b=1)), [[1] * 2_000], {"x": ("y", ("z",) * 4)}, set()],
    ids=str,
)
def test_plain_state_passes(state: Any) -> None:
    if state == set():
        assert scan_pickle(PROTO + b"\x8f" + STOP) == ()
    else:
        assert scan_pickle(pickle.dumps(state, protocol=2)) == ()


def test_an_object_may_be_given_its_state() -> None:
    assert scan_pickle(PROTO + ORDERED + b")R}" + text("_metadata") + b"Ns" + b"b" + STOP) == ()


@pytest.mark.parametrize(
    "program",
    [
        ORDERED + CLASS_STATE + b"b",
        ORDERED + b"q\x01" + b"h\x01" + CLASS_STATE + b"b",
        ORDERED + b"}" + text("items") + text("x") + b"sb",
        ORDERED + text("a") + text("b") + b"s",
        ORDERED + text("a") + b"a",
        ORDERED + b"(" + text("a") + b"e",
        b"})b",
        b"})R",
        text("print") + b")R",
        ORDERED + b")R)R",
        ORDERED + b")R)\x81",
        ORDERED + b")R" + CLASS_STATE + b"b",
    ],
    ids=["build on a class", "through the memo", "plain state on a class", "set item of a class", "append to a class", "extend a class",
         "build on a dictionary", "call a dictionary", "call text", "call what was made", "new of what was made",
         "attributes one by one"],
)  # fmt: skip
def test_nothing_is_done_to_a_class_and_nothing_but_a_name_is_called(program: bytes) -> None:
    reasons = scan_pickle(PROTO + program + STOP)
    assert reasons, "it would be loaded"
    assert "on what it is not for" in reasons[0]


def test_the_harm_is_real() -> None:
    """What the scan refuses does change a class for the whole process, so that the test above is about something."""

    class Harmless:
        pass

    class Finder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Harmless

    Finder(io.BytesIO(PROTO + ORDERED + CLASS_STATE + b"b" + STOP)).load()
    assert Harmless.items == "poisoned"  # type: ignore[attr-defined]


@pytest.mark.parametrize("program", [b"b", b"R", b"h\x07", b"e", b"0", b"(b", b"\x86", b""])
def test_a_stack_that_runs_empty_is_a_reason_and_no_crash(program: bytes) -> None:
    assert scan_pickle(PROTO + program + STOP)


@pytest.mark.parametrize("path", ["./x.pt", "a//b.pt", "a/./b.pt", "a/", "/a", "..", "a/../b", "", ".", "a\\b", "a\0", "manifest.json"])
def test_a_manifest_writes_a_file_s_name_in_one_way_only(path: str) -> None:
    with pytest.raises(ValueError, match="inside the checkpoint folder"):
        FileEntry(path=path, size_bytes=0, sha256="0" * 64)


@pytest.mark.parametrize("path", ["mp_rank_00_model_states.pt", "a/b.pt", "...", "a b", ".x"])
def test_plain_paths_are_taken(path: str) -> None:
    assert FileEntry(path=path, size_bytes=0, sha256="0" * 64).path == path
