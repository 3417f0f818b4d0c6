"""A run that is asked for in epochs is a run in steps: same bits, more epochs on the same run id go on, and all of it is shown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.progress import NoProgress, ProgressView, View, describe

Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]
TRAINING = {"segment_steps": 5, "global_batch_size": 4}


class Seen(NoProgress):
    """Keeps what people would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.views: list[ProgressView] = []

    def update(self, view: View) -> None:
        if isinstance(view, ProgressView):
            self.views.append(view)

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """40 rows of 32 tokens, one a document."""
    rows = [json.dumps({"text": f"{number:>3} " + "abcdefgh" * 3}) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return {"train": str(tmp_path / "rows.jsonl"), "validation": None, "sequence_length": 32, "packing": False}


def test_epochs_are_the_steps_that_they_make(drive: Drive, nano: Nano, data: dict[str, Any]) -> None:
    seen = Seen()
    in_epochs = drive(nano("epochs", data=data, training={**TRAINING, "epochs": 1, "warmup_ratio": 0.3}), progress=seen)
    in_steps = drive(nano("steps", data=data, training={**TRAINING, "max_steps": 10, "warmup_steps": 3}))
    assert in_epochs.applied_steps == 10
    assert (in_epochs.trajectory_digest, in_epochs.weights_digest) == (in_steps.trajectory_digest, in_steps.weights_digest)
    assert in_epochs.epochs == in_steps.epochs == 1.0
    assert "1 epoch of 40 rows are 10 steps of 4 rows, 3 of them warm-up" in seen.lines
    assert "epoch 1/1" in describe(seen.views[-1])
    record = json.loads((Path(in_epochs.run_folder) / "run.json").read_text())
    assert record["length"] == {"epochs": 1.0, "warmup_ratio": 0.3, "num_rows": 40}
    assert (record["request"]["training"]["max_steps"], record["request"]["training"]["warmup_steps"]) == (10, 3)
    assert "Epochs" in (Path(in_epochs.run_folder) / "report.html").read_text()


def test_more_epochs_go_on_where_the_run_stands(drive: Drive, nano: Nano, data: dict[str, Any]) -> None:
    def asked(run_id: str, epochs: float, **training: Any) -> RuntimeRequest:
        return nano(run_id, data=data, training={**TRAINING, "epochs": epochs, "warmup_ratio": 0.2, **training})

    drive(asked("pieces", 1))
    pieces = drive(asked("pieces", 2.5))
    straight = drive(asked("straight", 2.5, schedule_steps=10))
    assert (pieces.applied_steps, pieces.epochs) == (25, 2.5)
    assert (pieces.trajectory_digest, pieces.weights_digest) == (straight.trajectory_digest, straight.weights_digest)
    with pytest.raises(RequestError, match=r"training\.warmup_ratio"):
        drive(nano("pieces", data=data, training={**TRAINING, "epochs": 3, "warmup_ratio": 0.5}))
