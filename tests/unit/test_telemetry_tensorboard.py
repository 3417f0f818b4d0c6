"""TensorBoard files as TensorBoard itself reads them back."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mem_core.infrastructure.telemetry.metrics import METRIC_DTYPES, Columns
from mem_core.infrastructure.telemetry.tensorboard import POINTS_PER_SEGMENT, TensorBoardWriter


def segment(from_step: int, to_step: int, loss: float) -> Columns:
    steps = np.arange(from_step + 1, to_step + 1)
    columns: Columns = {name: np.ones(steps.size, dtype) for name, dtype in METRIC_DTYPES.items()}
    return {**columns, "step": steps, "loss": np.full(steps.size, loss), "step_s": np.full(steps.size, 0.5, np.float32)}


def read_back(run_folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_scalars_come_back_under_their_tags(tmp_path: Path) -> None:
    TensorBoardWriter(tmp_path).add_segment(segment(0, 4, 2.0), memory_limit_bytes=64)
    scalars = read_back(tmp_path)
    assert scalars["train/loss"] == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert scalars["speed/tokens_per_s"][0] == (1, 2.0)
    assert scalars["memory/limit_bytes"][0] == (1, 64.0)
    assert len(scalars) == 8


def test_redone_steps_do_not_appear_twice_after_a_resume_or_a_rollback(tmp_path: Path) -> None:
    first = TensorBoardWriter(tmp_path, clock=lambda: 1_700_000_000.0)
    first.add_segment(segment(0, 10, 1.0))
    first.add_segment(segment(10, 20, 2.0))
    first.add_segment(segment(10, 20, 3.0))
    resumed = TensorBoardWriter(tmp_path, clock=lambda: 1_600_000_000.0)
    resumed.add_segment(segment(15, 25, 4.0))
    losses = read_back(tmp_path)["train/loss"]
    assert [step for step, _ in losses] == list(range(1, 26))
    assert [value for _, value in losses] == [1.0] * 10 + [3.0] * 5 + [4.0] * 10


def test_a_spike_survives_the_thinning(tmp_path: Path) -> None:
    columns = segment(0, 5_000, 1.0)
    columns["loss"][3_210] = 77.0
    TensorBoardWriter(tmp_path).add_segment(columns)
    losses = read_back(tmp_path)["train/loss"]
    assert (3_211, 77.0) in losses
    assert (losses[0][0], losses[-1][0]) == (1, 5_000)
    assert len(losses) <= POINTS_PER_SEGMENT


def test_a_gradient_norm_that_the_engine_does_not_give_is_left_out(tmp_path: Path) -> None:
    columns = {**segment(0, 3, 1.0), "grad_norm": np.full(3, np.nan)}
    TensorBoardWriter(tmp_path).add_segment(columns)
    assert "train/grad_norm" not in read_back(tmp_path)


def test_faults_are_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    TensorBoardWriter(tmp_path).add_text("faults", "worker lost: rank 1", 120)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = accumulator.Tensors("faults/text_summary")
    assert (event.step, list(event.tensor_proto.string_val)) == (120, [b"worker lost: rank 1"])


def test_an_empty_segment_writes_nothing(tmp_path: Path) -> None:
    TensorBoardWriter(tmp_path).add_segment(segment(0, 0, 1.0))
    assert not (tmp_path / "tensorboard").exists()


def test_torch_stays_out_of_the_process_that_writes(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from mem_core.infrastructure.telemetry.tensorboard import TensorBoardWriter\n"
        "assert 'tensorboard' not in sys.modules\n"
        "TensorBoardWriter(pathlib.Path(sys.argv[1])).add_text('a', 'b', 1)\n"
        "sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=120).returncode == 0


@pytest.mark.slow
def test_a_thousand_segments_leave_memory_flat(tmp_path: Path) -> None:
    import psutil

    writer, process = TensorBoardWriter(tmp_path), psutil.Process()
    columns = segment(0, 1_000, 1.0)
    for number in range(1_200):
        if number == 200:
            before_bytes = process.memory_info().rss
        writer.add_segment({**columns, "step": columns["step"] + 1_000 * number})
    assert process.memory_info().rss - before_bytes < 3 * 2**20
