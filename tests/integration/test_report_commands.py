"""`mem status`, `mem report` and `mem logs` as functions on a run folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.commands.report import LOG_BLOCK_BYTES, run_logs, run_report, run_status, run_status_text, tail
from mem_core.domain.errors import RequestError
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
    program = f"import sys, flows.commands.report; sys.exit(','.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
