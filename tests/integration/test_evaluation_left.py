"""Whoever asks for an end while held-out rows are looked at gets it at once; the evaluation is done again by the same command."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import Interrupted
from mem_core.domain.events import Evaluated
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.progress import NoProgress
from mem_core.runtime.chaos.faults.view import RunView
from mem_core.runtime.session.opening.stages import Prepared
from mem_core.runtime.session.stop_flag import StopFlag
from mem_core.testing.ports import with_port

pytestmark = pytest.mark.integration
Drive, Asked = Callable[..., RunResult], Callable[..., RuntimeRequest]
STEPS, EVERY_STEPS, MANY_ROWS = 20, 10, 3_000
TRAINING = {"max_steps": STEPS, "segment_steps": EVERY_STEPS, "global_batch_size": 4, "warmup_steps": 2, "learning_rate": 3e-3}
WHOLE: dict[str, Any] = {}
LORA: dict[str, Any] = {"lora": {"rank": 4, "dropout": 0.1}}
HELD_S = 90.0  # of a pass that hangs
SOON_S, GONE_S, NEVER_S = 45.0, 15.0, 240.0  # deadlines for a busy machine, not expectations


@pytest.fixture
def asked(nano: Callable[..., RuntimeRequest], tmp_path: Path) -> Asked:
    """A request that evaluates twice, the second time after its last step."""

    def make(run_id: str, part: dict[str, Any], num_rows: int = 8) -> RuntimeRequest:
        for name, rows in {"train": range(60), "held": range(num_rows)}.items():
            lines = [json.dumps({"text": f"{row:>5} " + "abcdefgh" * (1 + row % 3)}) for row in rows]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        data = {"train": [str(tmp_path / "train.jsonl")], "validation": [str(tmp_path / "held.jsonl")], "sequence_length": 32}
        data["packing"] = False
        return nano(run_id, model=part, data=data, training=TRAINING, evaluation={"every_steps": EVERY_STEPS})

    return make


class HangsInEvaluation:
    """The first pass of an evaluation after `step`, once, takes longer than anybody waits."""

    def __init__(self, folder: Path, step: int) -> None:
        self.marker, self.step = folder / "hung", step

    def __call__(self, runner: Any) -> None:
        score = runner._passes.score

        def slow_score(*arguments: Any) -> Any:
            if runner.position.applied_steps == self.step and not self.marker.exists():
                self.marker.touch()
                time.sleep(HELD_S)
            return score(*arguments)

        runner._passes.score = slow_score


class StopInEvaluation(NoProgress):
    """Asks for a stop, as the signal handler does, once a rank says that it looks at held-out rows after `step`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker
        self.stop: StopFlag | None = None
        self.asked_s = 0.0

    def prepared(self, prepared: Prepared) -> None:
        self.stop = prepared.held.order.stop

    def update(self, view: Any) -> None:
        if self.stop is not None and not self.stop and self.marker.exists():
            self.asked_s = time.monotonic()
            self.stop.ask("SIGINT")


def evaluations(result: RunResult) -> list[tuple[int, float, float | None]]:
    """(step, loss, accuracy) of every evaluation in the journal, one for each time that one came to an end."""
    events = [line.event for line in read_journal(Path(result.run_folder) / "journal") if isinstance(line.event, Evaluated)]
    return [(event.step, event.validation_loss, event.sets["validation"].token_accuracy) for event in events]


def check_same(again: RunResult, clean: RunResult) -> None:
    assert (again.status, again.applied_steps) == ("completed", STEPS)
    assert (again.weights_digest, again.trajectory_digest) == (clean.weights_digest, clean.trajectory_digest)
    assert evaluations(again) == evaluations(clean)


@pytest.mark.parametrize(
    ("part", "step"),
    [
        pytest.param(WHOLE, EVERY_STEPS, id="whole-between", marks=pytest.mark.slow),
        pytest.param(WHOLE, STEPS, id="whole-last"),
        pytest.param(LORA, EVERY_STEPS, id="lora-between"),
        pytest.param(LORA, STEPS, id="lora-last", marks=pytest.mark.slow),
    ],
)
def test_a_stop_is_obeyed_in_any_evaluation(part: dict[str, Any], step: int, drive: Drive, asked: Asked, tmp_path: Path) -> None:
    """Between segments and after the last one: exit 75 with every step proven, and the same command does what was left."""
    port = HangsInEvaluation(tmp_path, step)
    stopper = StopInEvaluation(port.marker)
    with pytest.raises(Interrupted, match=f"stopped by SIGINT at validated step {step}") as caught:
        drive(asked("stopped", part), options=with_port(port), progress=stopper, prepared=stopper.prepared)
    assert time.monotonic() - stopper.asked_s < SOON_S
    assert caught.value.exit_code == 75
    check_same(drive(asked("stopped", part), options=with_port(port)), drive(asked("clean", part)))


@pytest.mark.parametrize("part", [pytest.param(WHOLE, id="whole", marks=pytest.mark.slow), pytest.param(LORA, id="lora")])
def test_a_driver_killed_in_an_evaluation_leaves_nothing_and_it_is_done_again(
    part: dict[str, Any], drive: Drive, asked: Asked, tmp_path: Path
) -> None:
    """`kill -9` of the driving process in both evaluations, the same request again each time."""
    request, view = asked("killed", part, MANY_ROWS), RunView(tmp_path / "killed")
    (tmp_path / "request.json").write_text(request.model_dump_json())
    for step in (EVERY_STEPS, STEPS):
        kill_in_evaluation(tmp_path, view, step)
        end_s = time.monotonic() + GONE_S
        while left := view.leftovers():
            assert time.monotonic() < end_s, left
            time.sleep(0.05)
    check_same(drive(request), drive(asked("clean", part, MANY_ROWS)))


def kill_in_evaluation(folder: Path, view: RunView, step: int) -> None:
    """Start the driver; SIGKILL once rank 0 looks at held-out rows after `step`."""
    program = [sys.executable, "-m", "mem_core.testing.driver", str(folder / "request.json")]
    with (folder / "driver.log").open("ab") as log:
        driver = subprocess.Popen(program, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    end_s = time.monotonic() + NEVER_S
    try:
        while not ((sign := view.sign()) is not None and (sign.beat.phase, sign.steps) == ("evaluate", step)):
            assert driver.poll() is None, (folder / "driver.log").read_text()[-2_000:]
            assert time.monotonic() < end_s, "the moment never came"
            view.processes()
            time.sleep(0.01)
        view.processes()
        assert driver.poll() is None
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
