"""A stop on purpose ends the step, commits what there is, and exits resumable; the same request goes on to the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.errors import Interrupted
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.progress import NoProgress
from mem_core.runtime.session.opening.stages import Prepared
from mem_core.runtime.session.stop_flag import StopFlag

pytestmark = pytest.mark.integration
SEGMENT_STEPS, STOP_AFTER = 30, 40
LORA: dict[str, Any] = {"lora": {"rank": 4, "dropout": 0.1}}


class StopAfter(NoProgress):
    """Asks for a stop, as the signal handler does, once the progress display has seen a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.stop: StopFlag | None = None

    def prepared(self, prepared: Prepared) -> None:
        self.stop = prepared.held.order.stop

    def update(self, view: Any) -> None:
        if self.stop is not None and getattr(view, "step", 0) > self.step:
            self.stop.ask("SIGTERM")


@pytest.mark.parametrize(
    ("num_ranks", "part"),
    [(1, {}), (2, {}), *(pytest.param(num_ranks, LORA, marks=pytest.mark.slow) for num_ranks in (1, 2))],
    ids=["whole-1", "whole-2", "lora-1", "lora-2"],
)
def test_a_run_stopped_in_a_segment_keeps_its_steps_and_goes_on_to_the_same_weights(
    drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest], tmp_path: Path, num_ranks: int, part: dict[str, Any]
) -> None:
    shape: dict[str, Any] = {
        "model": part,
        "training": {"max_steps": 400 if num_ranks == 1 else 150, "segment_steps": SEGMENT_STEPS, "warmup_steps": 10},
        "parallel": {"num_ranks": num_ranks, "zero_stage": 2},
    }
    stopper = StopAfter(STOP_AFTER)
    with pytest.raises(Interrupted, match="SIGTERM") as caught:
        drive(nano("stopped", **shape), progress=stopper, prepared=stopper.prepared)
    assert caught.value.exit_code == 75
    kept = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "stopped" / "checkpoints").glob("step-*"))
    assert STOP_AFTER < kept < shape["training"]["max_steps"]
    resumed = drive(nano("stopped", **shape))
    undisturbed = drive(nano("left-in-peace", **shape))
    assert resumed.status == "completed"
    assert (resumed.weights_digest, resumed.trajectory_digest) == (undisturbed.weights_digest, undisturbed.trajectory_digest)
