"""The command itself, struck while held-out rows are looked at: killed, told to stop, Ctrl-C; each time the same command goes on."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_tree import BackgroundMem, events, survivors

from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.chaos.faults.view import RunView

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]
EVERY_STEPS, NUM_ROWS = 10, 3_000
TRAINING = {"max_steps": 40, "segment_steps": 10, "global_batch_size": 4, "warmup_steps": 2, "learning_rate": 3e-3}
SIGNALS = {10: signal.SIGKILL, 20: signal.SIGINT, 30: signal.SIGTERM}
STOP_LIMIT_S = 30.0  # for a busy machine: it takes some seconds on a quiet one


def request_of(folder: Path, part: dict[str, Any]) -> dict[str, Any]:
    """Evaluations that take some seconds each."""
    for name, num_rows in {"train": 60, "held": NUM_ROWS}.items():
        lines = [json.dumps({"text": f"{row:>5} " + "abcdefgh" * (1 + row % 3)}) for row in range(num_rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    data = {"train": [str(folder / "train.jsonl")], "validation": [str(folder / "held.jsonl")], "sequence_length": 32, "packing": False}
    return {"model": part, "data": data, "training": TRAINING, "evaluation": {"every_steps": EVERY_STEPS}}


@pytest.mark.parametrize("part", [pytest.param({}, id="whole"), pytest.param({"lora": {"rank": 4, "dropout": 0.1}}, id="lora")])
def test_struck_in_three_evaluations_it_ends_with_the_same_weights(
    part: dict[str, Any], tmp_path: Path, drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest]
) -> None:
    sections, folder = request_of(tmp_path, part), tmp_path / "struck"
    (tmp_path / "request.json").write_text(json.dumps({"run_id": "struck", "store": ".", "device": "cpu", **sections}))
    for step, number in SIGNALS.items():
        strike(tmp_path, folder, step, number)
        assert [event["step"] for event in events(folder) if event["event"] == "evaluated"] == list(range(10, step, 10))
    result = BackgroundMem(tmp_path, "train", "request.json", "--json").finish()
    clean = drive(nano("clean", **sections))
    assert (result["status"], result["applied_steps"]) == ("completed", 40)
    assert (result["weights_digest"], result["trajectory_digest"]) == (clean.weights_digest, clean.trajectory_digest)
    assert [event["step"] for event in events(folder) if event["event"] == "evaluated"] == [10, 20, 30, 40]
    assert result["validation_loss"] == clean.validation_loss


def strike(folder: Path, run_folder: Path, step: int, number: signal.Signals) -> None:
    """Start the command; the signal comes while rank 0 looks at held-out rows after `step`. It ends soon and leaves nothing."""
    command, view = BackgroundMem(folder, "train", "request.json", "--json"), RunView(run_folder)
    command.wait_for(lambda: (sign := view.sign()) is not None and (sign.beat.phase, sign.steps) == ("evaluate", step), poll_s=0.01)
    if number == signal.SIGKILL:
        family = command.kill(whole_tree=False)
    else:
        family, asked_s = command.descendants(), time.monotonic()
        os.kill(command.process.pid, number)
        assert command.wait_code(STOP_LIMIT_S) == 75, command.error_text()
        print(f"{number.name} in an evaluation: ended after {time.monotonic() - asked_s:.1f} s")
        assert f"stopped by {number.name}" in command.error_text()
    assert survivors(family, run_folder) == []
