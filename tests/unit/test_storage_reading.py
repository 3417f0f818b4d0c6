"""The one opener: a plain file of a sane size, or a refusal at once, whatever lies there."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from mem_core.infrastructure.storage.reading import NotPlain, open_descriptor, open_regular, parse_json, read_json, read_regular

LIMIT = 1_000


def no_file(folder: Path, kind: str) -> Path:
    """Something of that kind where a file is expected."""
    path = folder / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "terminal":
        path.symlink_to("/dev/ptmx")
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device", "terminal"])
def test_what_is_no_plain_file_is_refused_at_once_and_named(tmp_path: Path, kind: str) -> None:
    path = no_file(tmp_path, kind)
    for read in (lambda: read_regular(path, LIMIT), lambda: open_regular(path), lambda: open_descriptor(path), lambda: read_json(path)):
        began_s = time.monotonic()
        with pytest.raises(OSError) as caught:
            read()
        assert time.monotonic() - began_s < 1
        word = "device" if kind == "terminal" else kind
        assert word in str(caught.value.strerror)


def test_a_file_that_is_too_long_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(NotPlain, match="1099511627776 bytes where at most 1000"):
        read_regular(path, LIMIT)
    with pytest.raises(NotPlain, match="more than the 10 bytes"):
        read_regular("/proc/self/status", 10)  # the kernel's files say that they have no bytes


def test_names_that_no_file_can_have_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotPlain, match="no file can have this name"):
        read_regular(f"{tmp_path}/\0", LIMIT)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "gone", LIMIT)
    with pytest.raises(OSError, match="too long"):
        read_regular(tmp_path / ("x" * 5_000), LIMIT)


def test_plain_files_and_links_to_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'{"a": "\\u00e9"}')
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link", 15) == {"a": "é"}
    with open_regular(tmp_path / "link") as file:
        assert file.read(2) == b'{"'
        assert file.seek(0, 2) == 15


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 150 + b"]" * 150, "more than 100 levels"),
        (b'{"a":' * 150 + b"1" + b"}" * 150, "more than 100 levels"),
        (b'{"\\ud800": 1}', "half a character"),
        (b'{"a": ["\\udfff"]}', "half a character"),
        (b"{", "Expecting"),
        (b"\xff\xfe", "."),
        (b"1" * 5_000, "limit"),
        (b"", "Expecting"),
    ],
)
def test_json_that_cannot_be_used_is_a_value_error(raw: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(raw)


def test_json_that_can_be_used_is_what_it_says() -> None:
    value = {"a": [1, 2.5, None, True, {"b": "\U0001f600"}]}
    assert parse_json(json.dumps(value)) == value
    assert parse_json("[" * 99 + "]" * 99) is not None
