"""Standard streams that are closed, full or broken, and text that a terminal would obey."""

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from mem_core.domain.errors import RequestError
from mem_core.domain.printable import printable
from mem_core.infrastructure.telemetry.progress import PreparingView, ProgressDisplay
from mem_core.infrastructure.telemetry.streams import SafeStream, why_lost

MEM = Path(sys.executable).with_name("mem")
HOSTILE = "run\x1b]0;owned\x07\x9b31m\x7f\r\u202egnp"
OBEYED = "\x1b\x07\x9b\x7f\r\u202e"


def shell(command: str, folder: Path) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["sh", "-c", command.replace("mem ", f"{MEM} ")], cwd=folder, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("mem status nothing >&- 2>&- <&-", 64),
        ("mem status nothing --json >/dev/full", 64),
        ("mem status nothing --json 2>/dev/full", 64),
        ("mem status nothing --json >&-", 64),
        ("mem --help >/dev/full", 0),
        ("mem --help >&- 2>&-", 0),
        ("mem --nothing 2>/dev/full", 2),
        ("mem doctor - <&-", 64),
    ],
)
def test_the_exit_code_is_the_documented_one_whatever_the_streams_are(command: str, code: int, tmp_path: Path) -> None:
    done = shell(command, tmp_path)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr + done.stdout


def test_an_answer_that_could_not_be_written_is_said_on_the_other_stream(tmp_path: Path) -> None:
    assert b"standard output could not be written (No space left on device)" in shell("mem --help >/dev/full", tmp_path).stderr
    assert shell("mem --help | true", tmp_path).stderr == b"", "a reader who leaves means it"


def test_no_file_is_opened_in_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """Else the next file that is opened would be standard output."""
    program = (
        "import os; from mem_core.infrastructure.telemetry.streams import secure_standard_streams as s; s();"
        "f = open('kept', 'wb'); print('lost'); os.write(1, b'lost'); f.write(b'kept'); f.flush(); os._exit(os.get_inheritable(1))"
    )
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{program}" >&- 2>&- <&-'], cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, (tmp_path / "kept").read_bytes()) == (1, b"kept")


def test_a_deleted_working_folder_is_named_before_anything_starts(tmp_path: Path) -> None:
    request = tmp_path / "request.yaml"
    request.write_text("run_id: run\n")
    done = shell(f'mkdir gone && cd gone && rmdir "$PWD" && mem train {request} --json', tmp_path)
    assert done.returncode == 69
    answer = json.loads(done.stdout)
    assert f"the working folder is gone (got {tmp_path}/gone" in answer["message"]
    assert not list(tmp_path.glob("**/run"))


def test_what_a_terminal_would_obey_is_shown_as_text() -> None:
    assert printable("plain\ttext\nü 漢字 €") == "plain\ttext\nü 漢字 €"
    assert printable(HOSTILE) == "run\\u001b]0;owned\\u0007\\u009b31m\\u007f\\u000d\\u202egnp"
    assert json.loads(printable(json.dumps({"a": HOSTILE}, ensure_ascii=False)))["a"] == HOSTILE


def test_a_stream_shows_it_as_text_and_goes_nowhere_once_it_is_full(tmp_path: Path) -> None:
    inner = io.StringIO()
    stream = SafeStream(inner, 99)
    print(HOSTILE, file=stream)  # type: ignore[arg-type]
    assert not set(inner.getvalue()) & set(OBEYED)
    with (tmp_path / "file").open("w") as place, Path("/dev/full").open("w") as full:
        os.dup2(full.fileno(), place.fileno())
        stream = SafeStream(place, place.fileno())
        for _ in range(2):
            stream.write("text")
            stream.flush()
        assert why_lost(stream) == "No space left on device"


def test_an_error_holds_nothing_that_a_terminal_would_obey_and_survives_pickling() -> None:
    error = RequestError(HOSTILE, field=HOSTILE, value=HOSTILE * 20, bound=HOSTILE, remedy=HOSTILE)
    assert not set(str(error)) & set(OBEYED)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("live", [True, False])
def test_the_progress_display_shows_texts_of_others_as_text(live: bool) -> None:
    """Its own escape sequences, which redraw the line, are its own."""
    stream = io.StringIO()
    with ProgressDisplay(stream, live=live, width=200) as display:
        display.note(HOSTILE)
        display.update(PreparingView(1, 2, source=HOSTILE))
        display.note(HOSTILE)
    shown = stream.getvalue()
    assert "]0;owned\x07" not in shown
    assert "\x1b]0;" not in shown
    assert not set(shown) & {"\x9b", "\x7f", "\u202e"}
    assert shown.count("owned") >= 3
    assert ("\x1b" in shown) == live


@pytest.mark.parametrize("words", [["status", HOSTILE], ["checkpoints", "list", HOSTILE], ["train", f"/nowhere/{HOSTILE}"], [HOSTILE]])
def test_a_command_never_echoes_it(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run([str(MEM), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (2, 64)
    assert not set(done.stdout + done.stderr) & set(OBEYED)
    assert "owned" in done.stderr
