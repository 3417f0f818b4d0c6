"""What lies in a run folder instead of MEM's files: pipes, devices, folders, copies, unreadable and foreign things. Said, never hung on."""

import json
import os
import shutil
import socket
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flows.commands import policy as policy_commands
from flows.commands import report as report_commands
from flows.commands.checkpoints import list_checkpoints, verify_checkpoints
from flows.commands.inspection.logs import run_logs, told
from flows.commands.inspection.runs import local_row
from flows.commands.stop import stop_run
from mem_core.core.doctor.storage import SMALLEST_FILE_LIMIT_BYTES, file_size_findings
from mem_core.core.run.holder import observe_holder
from mem_core.core.run.journal_check import check_journal
from mem_core.core.run.lease import own_lease_path, read_lease
from mem_core.core.run.record import RECORD_NAME, SEAL_NAME, RunRecord, read_record
from mem_core.core.run.run_report import load_report_data
from mem_core.core.run.state_manager import StateManager, read_journal
from mem_core.domain.environment import AcceleratorObservation, BuildObservation, MachineObservations, StoreObservation
from mem_core.domain.errors import MemError, NoValidCheckpoint, RunHeld, StoreUnavailable
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.metrics import METRIC_DTYPES, read_metrics_and_notes, read_segment_metrics, write_segment_metrics
from mem_core.testing.checkpoint_run import Run as CheckpointRun
from mem_core.testing.checkpoint_run import proven
from mem_core.testing.synthetic_history import SyntheticRun

SETTINGS = Settings.from_environment({"MEM_HOME": "/nonexistent"})
VERBS: dict[str, Callable[[Path], object]] = {
    "status": report_commands.run_status_text,
    "status --json": report_commands.run_status,
    "report": load_report_data,  # drawing it takes a second and reads nothing more
    "logs": told,
    "logs --workers": lambda folder: list(run_logs(folder)),
    "runs": local_row,
    "checkpoints list": lambda folder: list_checkpoints(folder, as_json=True, settings=SETTINGS),
    "checkpoints verify": lambda folder: verify_checkpoints(folder, as_json=True, settings=SETTINGS),
    "policy replay": lambda folder: policy_commands.replay_decisions(policy_commands.read_journal_files(folder)),
    "policy explain": lambda folder: policy_commands.explain_run(policy_commands.read_journal_files(folder)),
    "stop": lambda folder: stop_run(folder, 0.0),
}
FILES = (
    "journal/attempt-0001.jsonl",
    "run.json",
    "run.sealed.json",
    "lease.json",
    "report.html",
    "metrics/step-000000010.npz",
    "logs/rank-0.log",
)
FOLDERS = ("journal", "metrics", "logs", "checkpoints", "quarantine", "pins")


def replace(path: Path, kind: str) -> None:
    """Something of that kind in place of a file or folder."""
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}.away"))
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(path))
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 41)
    elif kind == "deep":
        path.write_bytes(b"[" * 100_000 + b"\n")
    elif kind == "file":
        path.write_bytes(b"not a folder")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with everything in it: two attempts, metrics, logs, checkpoints, record, lease."""
    folder = tmp_path / "demo"
    SyntheticRun(num_steps=30, segment_steps=10).write(folder)
    facts = {"device": "cpu", "dtype": "float32", "data_fingerprint": "", "model_fingerprint": ""}
    plan, request = MemoryPlan(micro_batch_rows=1), RuntimeRequest(run_id="demo", store=str(tmp_path))
    state = StateManager.acquire(tmp_path, "demo")
    state.write_record(RunRecord(run_id="demo", request=request, default_plan=plan, **facts))
    state.start_attempt(None)
    state.release()
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text("line\n")
    proven(CheckpointRun(folder).attempt(), 10, 20)
    return folder


def told(verb: str, folder: Path) -> str:
    """How a verb ends: "", or the documented code. It neither hangs nor fails in another way."""
    began_s = time.monotonic()
    try:
        VERBS[verb](folder)
        code = ""
    except MemError as exc:
        code = str(exc.exit_code)
    assert time.monotonic() - began_s < 10
    assert code in ("", "64", "66", "73", "74", "76")
    return code


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_answers_about_a_whole_run(run: Path, verb: str) -> None:
    assert told(verb, run) == ""


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket", "loop", "dangling", "huge", "deep"])
@pytest.mark.parametrize("name", FILES)
def test_no_verb_hangs_or_breaks_on_what_lies_in_a_file_s_place(
    run: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run)  # a socket's path is short
    replace(run / name, kind)
    endings = {verb: told(verb, run) for verb in VERBS}
    if name.startswith("journal") and kind != "deep":
        assert endings["status"] == endings["status --json"] == endings["policy replay"] == "73", "an unreadable history is not told"
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "pipe", "dangling", "loop"])
@pytest.mark.parametrize("name", FOLDERS)
def test_no_verb_breaks_on_what_lies_in_a_folder_s_place(run: Path, name: str, kind: str) -> None:
    replace(run / name, kind)
    assert {told(verb, run) for verb in VERBS} <= {"", "64", "73", "74"}


def test_a_copy_of_a_journal_file_is_no_attempt(run: Path) -> None:
    before = report_commands.run_status(run), read_journal(run / "journal"), check_journal(run / "journal")
    for name in (
        "attempt-0001 (copy).jsonl",
        "attempt-1.jsonl",
        "attempt-0001.jsonl~",
        "attempt-.jsonl",
        "attempt-٠٠٠١.jsonl",
        "notes.jsonl",
    ):
        shutil.copy(run / "journal" / "attempt-0001.jsonl", run / "journal" / name)
    assert (report_commands.run_status(run), read_journal(run / "journal"), check_journal(run / "journal")) == before
    assert {told(verb, run) for verb in VERBS} == {""}
    state = StateManager.acquire(run.parent, "demo")
    assert state.attempt == 3
    state.release()


def test_a_run_with_an_unreadable_journal_is_not_taken(run: Path) -> None:
    replace(run / "journal" / "attempt-0001.jsonl", "pipe")
    with pytest.raises(StoreUnavailable, match="it is a named pipe"):
        StateManager.acquire(run.parent, "demo")


def test_a_run_killed_before_its_first_line_tells_when_it_began(tmp_path: Path) -> None:
    """Not how long ago the clock of all computers began."""
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "attempt-0001.jsonl").touch()
    assert "sign of life  0." in report_commands.run_status_text(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "huge", "deep", "dangling"])
def test_one_copy_of_the_record_is_enough_whatever_became_of_the_other(run: Path, kind: str) -> None:
    whole = read_record(run)
    for name in (RECORD_NAME, SEAL_NAME):
        kept = (run / name).read_bytes()
        replace(run / name, kind)
        assert read_record(run) == whole
        if kind == "folder":
            (run / name).rmdir()
        (run / name).unlink(missing_ok=True)
        (run / name).write_bytes(kept)
    for name in (RECORD_NAME, SEAL_NAME):
        replace(run / name, kind)
    with pytest.raises(NoValidCheckpoint, match=r"cannot be read|damaged"):
        read_record(run)


def change_lease(run: Path, **change: object) -> None:
    """The same in everybody's file and in the attempt's own."""
    text = json.dumps({**json.loads((run / "lease.json").read_text()), **change})
    for path in (run / "lease.json", own_lease_path(run, 2)):
        path.write_text(text)


@pytest.mark.parametrize(
    "change", [{"pid": -1}, {"pid": 0}, {"pid": 10**20}, {"attempt": 0}, {"pid": "x"}, {"expires_unix_s": None}, {"more": 1}], ids=str
)
def test_a_lease_with_impossible_numbers_is_none(run: Path, change: dict[str, object]) -> None:
    """A signal to process -1 reaches every process there is."""
    change_lease(run, **change)
    assert read_lease(run) is None
    assert observe_holder(run) is None
    assert told("stop", run) == "64"


def test_a_holder_on_another_machine_is_not_signalled_here(run: Path) -> None:
    change_lease(run, host="elsewhere", released=False, expires_unix_s=time.time() + 60)
    with pytest.raises(RunHeld, match="on elsewhere"):
        stop_run(run, 0.0)


def test_metrics_that_are_none_are_named_and_left_out(tmp_path: Path) -> None:
    columns = {name: np.arange(5).astype(dtype) for name, dtype in METRIC_DTYPES.items()}
    path = write_segment_metrics(tmp_path, 5, columns)
    whole = path.read_bytes()
    assert read_segment_metrics(path)["step"].tolist() == [0, 1, 2, 3, 4]
    bomb = tmp_path / "step-000000010.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("loss.npy", "w", force_zip64=True) as member:
        member.write(bytes(1 << 22))
    with pytest.raises(ValueError, match="unpack to more"):
        read_segment_metrics(bomb, limit_bytes=1 << 20)
    for number, content in enumerate((b"", whole[:-50], whole[:100], b"PK", np.lib.format.magic(1, 0), b"x" * 1_000), start=11):
        (tmp_path / f"step-{number:09d}.npz").write_bytes(content)
    (tmp_path / "step-000000020.npz").symlink_to("nowhere")
    kept, notes = read_metrics_and_notes(tmp_path)
    assert kept["step"].tolist() == [0, 1, 2, 3, 4]
    assert len(notes) == 8


def observed(**more: object) -> MachineObservations:
    parts = {
        "accelerator": AcceleratorObservation(available=False),
        "store": StoreObservation(location="/s"),
        "build": BuildObservation(folder="/o"),
    }
    return MachineObservations.model_validate({"num_cores": 1, **parts, **more})


def test_the_doctor_names_a_limit_on_files() -> None:
    assert file_size_findings(observed(), 10**12) == ()
    assert file_size_findings(observed(file_size_limit_bytes=SMALLEST_FILE_LIMIT_BYTES), 1) == ()
    for limit, checkpoint in ((SMALLEST_FILE_LIMIT_BYTES - 1, 1), (10**9, 10**9 + 1)):
        (finding,) = file_size_findings(observed(file_size_limit_bytes=limit), checkpoint)
        assert (finding.exit_code, "ulimit -f" in finding.observed) == (73, True)
