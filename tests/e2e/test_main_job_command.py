"""`mem train` as people meet it: one command trains, answers, reports; the same again answers at once; more steps go on."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from process_tree import events, marked_processes, num_attempts

from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult

pytestmark = pytest.mark.integration
STEPS, SEGMENT_STEPS = 300, 100
MEM = Path(sys.executable).with_name("mem")
REQUEST = f"""
run_id: first
store: .
device: cpu
model: {{source: preset:llama-nano}}
data: {{train: ["stdlib:"]}}
training: {{max_steps: {STEPS}, segment_steps: {SEGMENT_STEPS}, warmup_steps: 10, learning_rate: 1.0e-3}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the command is given."""
    return tmp_path_factory.mktemp("command")


@pytest.fixture(scope="module")
def first(home: Path, run_mem: Callable[..., object]) -> object:
    """The command, once, to its end."""
    (home / "request.yaml").write_text(REQUEST)
    return run_mem(home, "train", "request.yaml", "--json")


def test_it_completes_and_the_loss_clearly_falls(first, home: Path) -> None:  # type: ignore[no-untyped-def]
    assert first.code == 0, first.err
    result = RunResult.model_validate_json(first.out)
    assert (result.status, result.applied_steps, result.skipped_steps, result.restarts) == ("completed", STEPS, 0, 0)
    assert result.loss_first is not None
    assert result.loss_last is not None
    assert result.loss_first > 5.0, "384 tokens of random weights"
    assert result.loss_last < 0.6 * result.loss_first
    assert result.validation_loss is not None
    assert result.validation_loss < 0.7 * result.loss_first
    assert result.checkpoints.written == result.checkpoints.validated == STEPS // SEGMENT_STEPS
    assert result.checkpoints.rejected == 0
    assert result.device == "cpu"
    assert result.tokens == STEPS * 8 * 127
    assert 0 < result.goodput.fraction <= 1


def test_people_see_a_line_on_the_device_and_the_report(first) -> None:  # type: ignore[no-untyped-def]
    assert "run first: completed" in first.err
    assert "report" in first.err
    assert "Traceback" not in first.err
    assert "Warning" not in first.err


def test_it_leaves_a_report_a_result_and_curves(first, home: Path) -> None:  # type: ignore[no-untyped-def]
    folder = home / "first"
    page = Path(unquote(urlparse(first.answer["report_url"]).path))
    text = page.read_text(encoding="utf-8")
    assert page == folder / "report.html"
    assert text.count("<svg") + text.count("data:image/png") >= 4, "loss, learning rate, memory, step time, goodput"
    assert json.loads((folder / "result.json").read_text())["weights_digest"] == first.answer["weights_digest"]
    assert list((folder / "tensorboard").glob("events.*"))
    assert sorted(path.name for path in (folder / "metrics").glob("step-*.npz")) == [f"step-{n:09d}.npz" for n in (100, 200, 300)]
    assert (folder / "metrics" / "evaluations.npz").exists()


def test_nothing_is_left_behind(first, home: Path) -> None:  # type: ignore[no-untyped-def]
    folder = home / "first"
    assert first.code == 0
    assert marked_processes(folder) == []
    assert [path for path in folder.glob("staging/**/*") if path.is_file()] == []
    assert [path for path in folder.glob("live/**/*") if path.is_file()] == []
    assert json.loads((folder / "lease.json").read_text())["released"] is True


def test_the_same_request_gives_the_same_bits_in_another_way_of_running_it(
    first,  # type: ignore[no-untyped-def]
    drive: Callable[..., RunResult],
    nano: Callable[..., RuntimeRequest],
) -> None:
    """Second run of the same values: without Prefect, from another fork server, in segments of another length."""
    training = {"max_steps": STEPS, "segment_steps": 150, "warmup_steps": 10, "learning_rate": 1e-3}
    second = drive(nano("second", training=training))
    assert second.weights_digest == first.answer["weights_digest"]
    assert second.trajectory_digest == first.answer["trajectory_digest"]


def test_the_same_command_again_answers_at_once_and_changes_nothing(first, home: Path, run_mem) -> None:  # type: ignore[no-untyped-def]
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (home / "first").rglob("*"))
    again = run_mem(home, "train", "request.yaml", "--json")
    assert again.code == 0, again.err
    assert "nothing is to be done" in again.err
    assert again.answer == first.answer
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (home / "first").rglob("*")) == before


def test_other_values_for_the_same_run_are_refused_at_once(first, home: Path, run_mem) -> None:  # type: ignore[no-untyped-def]
    other = run_mem(home, "train", "request.yaml", "--set", "training.learning_rate=0.002", "--json")
    assert (first.code, other.code) == (0, 64)
    assert "training.learning_rate" in other.answer["message"]
    assert num_attempts(home / "first") == 1


def test_the_verbs_that_look_at_a_run(first, home: Path, run_mem) -> None:  # type: ignore[no-untyped-def]
    assert first.code == 0
    status = run_mem(home, "status", "first", "--store", ".", "--json")
    assert (status.code, status.answer["status"]) == (0, "completed")
    verified = run_mem(home, "checkpoints", "verify", "first", "--store", ".", "--json")
    assert verified.code == 0, verified.err
    assert [item["step"] for item in verified.answer] == [100, 200, 300]
    assert all(item["valid"] for item in verified.answer)
    for words in (["report", "first"], ["logs", "first"], ["checkpoints", "list", "first"], ["policy", "replay", "first"]):
        looked = run_mem(home, *words, "--store", ".")
        assert looked.code == 0, looked.err
    assert run_mem(home, "stop", "first", "--store", ".").code == 0
    assert run_mem(home, "status", "nobody", "--store", ".").code == 64


def test_the_doctor_answers_and_changes_nothing(first, home: Path, run_mem) -> None:  # type: ignore[no-untyped-def]
    assert first.code == 0
    before = sorted(path.name for path in home.iterdir())
    looked = run_mem(home, "doctor", "request.yaml", "--set", "run_id=other", "--json")
    assert looked.code == 0, looked.err
    assert "Ready to run" in looked.err
    assert {"disk", "memory.training", "versions"} <= {finding["check"] for finding in looked.answer["findings"]}
    assert sorted(path.name for path in home.iterdir()) == before


def test_more_steps_of_a_finished_run_go_on_from_its_end(first, home: Path, run_mem) -> None:  # type: ignore[no-untyped-def]
    more = run_mem(home, "train", "request.yaml", "--set", "training.max_steps=320", "--json")
    assert more.code == 0, more.err
    assert more.answer["applied_steps"] == 320
    assert more.answer["weights_digest"] != first.answer["weights_digest"]
    started = [event["from_step"] for event in events(home / "first", attempt=2) if event["event"] == "segment_started"]
    assert started == [STEPS]


SLOW_STREAMS = ("--json >/dev/full", "--json 2>/dev/full", ">&- 2>/dev/full")


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW_STREAMS)])
def test_streams_that_are_closed_or_full_cost_no_work(streams: str, tmp_path: Path) -> None:
    """A run of twenty steps completes with its exit code, and its result lies in its folder."""
    (tmp_path / "request.yaml").write_text(REQUEST)
    steps = "--set training.max_steps=20 --set training.segment_steps=10"
    done = subprocess.run(["sh", "-c", f"{MEM} train request.yaml {steps} {streams}"], cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0
    assert json.loads((tmp_path / "first" / "result.json").read_text())["applied_steps"] == 20
    assert marked_processes(tmp_path / "first") == []
