"""`mem status`, `mem report` and `mem logs` as functions on a run folder."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.commands.inspection.logs import LOG_BLOCK_BYTES, followed, print_logs, run_logs, tail
from flows.commands.inspection.runs import list_runs, remote_rows
from flows.commands.report import run_report, run_status, run_status_text
from mem_core.core.run.lease import LeaseFile
from mem_core.domain.errors import RequestError
from mem_core.domain.run import LiveStep
from mem_core.infrastructure.storage.port import ObjectStat
from mem_core.infrastructure.telemetry.live import write_live
from mem_core.testing.synthetic_history import SyntheticRun
from mem_core.testing.synthetic_run import JournalBuilder


def test_status_is_the_folded_result(tmp_path: Path) -> None:
    run_folder = tmp_path / "demo"
    SyntheticRun(num_steps=600, segment_steps=200).write(run_folder)
    result = run_status(run_folder)
    assert (result.status, result.run_id, result.applied_steps, result.report_url) == ("completed", "demo", 600, "")
    assert json.loads(result.model_dump_json())["checkpoints"]["validated"] == 3
    run_report(run_folder)
    assert run_status(run_folder).report_url.startswith("file://")


def test_status_of_a_run_without_an_end_tells_the_age_of_its_last_sign_of_life(tmp_path: Path) -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    builder.write(tmp_path / "journal")
    text = run_status_text(tmp_path, now_unix_s=builder.now_s + 90)
    assert "last sign of life  1 min 30 s ago" in text
    assert "sign of life" not in run_status_text_of_ended(tmp_path / "ended")


def run_status_text_of_ended(run_folder: Path) -> str:
    JournalBuilder().start().segment(0, 0, 100).end().write(run_folder / "journal")
    return run_status_text(run_folder)


def test_a_folder_that_holds_no_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for command in (run_status, run_status_text, run_report, run_logs):
        with pytest.raises(RequestError, match="--store") as caught:
            command(tmp_path / "nowhere")
        assert caught.value.exit_code == 64
    assert not (tmp_path / "nowhere").exists()


def test_logs_show_the_tail_of_each_file_newest_last(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "logs").mkdir()
    for age_s, name in ((10, "rank-1.log"), (20, "rank-0.log")):
        path = tmp_path / "logs" / name
        path.write_text("".join(f"{name} line {number}\n" for number in range(100)))
        os.utime(path, (1_700_000_000 - age_s, 1_700_000_000 - age_s))
    assert list(run_logs(tmp_path, 2)) == [
        "==> rank-0.log <==", "rank-0.log line 98", "rank-0.log line 99",
        "==> rank-1.log <==", "rank-1.log line 98", "rank-1.log line 99",
    ]  # fmt: skip


def test_logs_of_a_healthy_run_tell_its_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Segments, verdicts and faults with their times, oldest first; `--lines` keeps the last ones; `--json` leaves nothing out."""
    SyntheticRun(num_steps=600, segment_steps=200).write(tmp_path / "demo")
    assert print_logs(tmp_path / "demo", workers=False, follow=True, as_json=False) == 0  # it has ended: there is nothing to wait for
    told = capsys.readouterr().out.splitlines()
    assert all(line[:4].isdigit() and line[19:21] == "  " for line in told)
    for words in (
        "attempt 1 begins",
        "segment 0 begins: steps 0 to 200",
        "segment 2 done: step 600",
        "checkpoint 600 proven",
        "completed, exit 0",
    ):
        assert sum(words in line for line in told) == 1, words
    print_logs(tmp_path / "demo", workers=False, follow=False, as_json=False, num_lines=3)
    assert capsys.readouterr().out.splitlines() == told[-3:]
    print_logs(tmp_path / "demo", workers=False, follow=False, as_json=True)
    events = [json.loads(line)["event"]["event"] for line in capsys.readouterr().out.splitlines()]
    assert events[0] == "attempt_started"
    assert len(events) > len(told)


def test_a_story_that_is_followed_goes_on_with_what_is_written_and_ends_with_the_run(tmp_path: Path) -> None:
    JournalBuilder().start().segment(0, 0, 100).end().write(tmp_path / "journal")
    (path,) = (tmp_path / "journal").iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0])
    pieces = [piece for line in lines[1:] for piece in (line[:20], line[20:])]  # a line is seen once it is whole
    LeaseFile(tmp_path, "demo", 1, time.time).write(60.0)

    def sleep(_: float) -> None:
        with path.open("ab") as file:
            file.write(pieces.pop(0))

    seen = [line.model_dump_json().encode() for line in followed(tmp_path, sleep, after=0)]
    assert seen == [line.strip() for line in lines[1:]]
    assert not pieces


def test_nobody_waits_for_a_run_whose_driver_has_gone(tmp_path: Path) -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    builder.write(tmp_path / "journal")
    last = builder.lines[-1].sequence
    assert list(followed(tmp_path, lambda _: pytest.fail("it waits"), after=last)) == []
    between = list(followed(tmp_path, lambda _: pytest.fail("it waits"), after=0))
    assert between == builder.lines[1:], "what was written between the reading and the following is told"


def test_status_tells_what_a_run_does_right_now_as_long_as_its_driver_lives(tmp_path: Path) -> None:
    JournalBuilder().start().segment(0, 0, 100).write(tmp_path / "journal")
    where = {"attempt": 1, "segment_index": 1, "until_step": 200, "step": 143, "total_steps": 1_000}
    now = LiveStep(**where, time_unix_s=time.time(), steps_per_s=21.4, left_s=40.0, loss=3.2)
    write_live(tmp_path, now)
    assert run_status(tmp_path).live is None, "nobody holds the run"
    LeaseFile(tmp_path, "demo", 1, time.time).write(60.0)
    assert run_status(tmp_path).live == now
    text = run_status_text(tmp_path, now_unix_s=now.time_unix_s + 2)
    assert "now                step 143 of 1,000 in segment 1 (until 200), 21.4 steps/s, 40.0 s left, loss 3.2000 (2.0 s ago)" in text
    write_live(tmp_path, now.model_copy(update={"attempt": 2}))
    assert run_status(tmp_path).live is None, "another attempt wrote it"


def test_all_runs_of_a_store_stand_in_one_table_and_a_broken_one_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SyntheticRun(num_steps=600, segment_steps=200).write(tmp_path / "whole")
    JournalBuilder().start().segment(0, 0, 100).write(tmp_path / "gone" / "journal")
    (tmp_path / "broken" / "journal").mkdir(parents=True)
    os.mkfifo(tmp_path / "broken" / "journal" / "attempt-0001.jsonl")
    (tmp_path / "no-run").mkdir()
    assert list_runs(str(tmp_path), as_json=True) == 0
    rows = {row["run_id"]: (row["state"], row["step"]) for row in json.loads(capsys.readouterr().out)}
    assert rows == {"whole": ("completed", 600), "gone": ("stopped", 100), "broken": ("unreadable", None)}
    list_runs(str(tmp_path), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["run", "state", "step"]
    assert len(lines) == 4
    with pytest.raises(RequestError, match="no such store"):
        list_runs(str(tmp_path / "nowhere"), as_json=False)
    with pytest.raises(RequestError, match="user, password or key") as caught:
        list_runs("http://me:hunter2@host/x", as_json=False)
    assert "hunter2" not in str(caught.value)


def test_runs_of_a_remote_store_are_known_by_their_copies() -> None:
    files = ("checkpoints/step-000000010/attempt-1-1a2b3c4d/manifest.json", "checkpoints/step-000000020/attempt-1-1a2b3c4d/model.pt")
    objects = [ObjectStat(f"run-a/{name}", 10, 100.0 + index) for index, name in enumerate(files)] + [ObjectStat("photos/cat.png", 10)]
    (row,) = remote_rows(objects)
    assert (row.run_id, row.state, row.step, row.last_word_unix_s) == ("run-a", "stored", 10, 101.0)


def test_a_tail_reads_over_block_borders_and_takes_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    lines = [f"{number} " + "x" * 997 for number in range(200)]
    path.write_text("\n".join(lines))
    assert path.stat().st_size > 2 * LOG_BLOCK_BYTES
    assert tail(path, 150) == lines[-150:]
    assert tail(path, 1_000) == lines
    assert tail(path, 0) == []
    path.write_bytes(b"ok\n\xff\xfe\n")
    assert tail(path, 5) == ["ok", "��"]
    path.write_bytes(b"")
    assert tail(path, 5) == []


def test_the_commands_need_neither_prefect_nor_anything_heavy_to_start() -> None:
    heavy = ("prefect", "torch", "matplotlib", "tensorboard", "deepspeed", "transformers", "rich")
    modules = "flows.commands.report, flows.commands.inspection.logs, flows.commands.inspection.runs"
    program = f"import sys, {modules}; sys.exit(','.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
