"""The loss scale of float16 at its floor: told by DeepSpeed's own scaler, with the way it fell."""

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from mem_core.runtime.deepspeed.engine import Engine, LossScaleAtFloor, is_floor, scale_of
from mem_core.runtime.deepspeed.step_columns import LossScaleHistory


def scaler(initial: float = 8.0) -> Any:
    import torch

    return DynamicLossScaler(
        init_scale=initial, scale_window=1000, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False,
        raise_error_at_min_scale=True, dtype=torch.float16,
    )  # fmt: skip


class Overflowing:
    """DeepSpeed's engine as far as a step goes, with its own scaler and gradients that always overflow."""

    def __init__(self) -> None:
        self.optimizer = SimpleNamespace(loss_scaler=scaler())
        self.skipped_steps = 0

    def step(self) -> None:
        scaler = self.optimizer.loss_scaler
        if scaler.cur_scale == scaler.min_scale:
            scaler.update_scale(True)
        scaler.cur_scale /= 2  # what it does itself where a process group stands
        self.skipped_steps += 1


def test_the_floor_is_its_own_error_with_the_scales_history() -> None:
    """8, 4, 2, 1 and then no further."""
    engine: Any = Engine.__new__(Engine)
    engine.raw = Overflowing()
    history = LossScaleHistory()
    for batch in range(3):
        applied = engine.step()
        history.add(batch, engine.loss_scale(), applied=applied)
    with pytest.raises(LossScaleAtFloor):
        engine.step()
    assert "4 after batch 0, 2 after batch 1, 1 after batch 2" in history.words()
    assert "3 skipped updates in a row" in history.words()


def test_other_errors_of_a_step_stay_what_they_are() -> None:
    """Only the floor is numeric."""
    assert not is_floor(RuntimeError("CUDA error: device-side assert triggered"))
    engine: Any = Engine.__new__(Engine)
    engine.raw = SimpleNamespace(skipped_steps=0, step=lambda: {}["x"])
    with pytest.raises(KeyError):
        engine.step()


def test_a_scale_is_found_where_one_is_used() -> None:
    """ZeRO's optimizers hold a scaler, the plain one the number, float32 none."""
    assert scale_of(SimpleNamespace(loss_scaler=scaler(16.0))) == 16.0
    assert scale_of(SimpleNamespace(cur_scale=4)) == 4.0
    assert scale_of(object()) is None


def test_an_applied_step_ends_the_row_of_skipped_ones() -> None:
    """And the same scale is written down once; a long life does not grow."""
    history = LossScaleHistory()
    for batch in range(100):
        history.add(batch, 2.0 ** (batch % 50), applied=batch % 3 == 0)
    assert history.skipped_in_a_row == 0
    assert len(history.changes) == 24
    assert "no step was done" in LossScaleHistory().words()
