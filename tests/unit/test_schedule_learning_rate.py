"""The learning rate is a pure function of the batch index: warm-up, decay to a floor, and a horizon that later requests do not bend."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mem_core.domain.request import TrainingSection
from mem_core.runtime.deepspeed.schedule import learning_rate

PEAK, FLOOR = 1e-3, 0.1


def section(schedule: str = "cosine", warmup: int = 10, horizon: int = 110, **more: object) -> TrainingSection:
    return TrainingSection.model_validate(
        {"max_steps": 1_000, "schedule_steps": horizon, "schedule": schedule, "warmup_steps": warmup, "learning_rate": PEAK,
         "min_lr_ratio": FLOOR} | more
    )  # fmt: skip


@pytest.mark.parametrize(("index", "part"), [(0, 0.1), (4, 0.5), (9, 1.0)])
def test_warm_up_is_linear_and_its_first_step_already_trains(index: int, part: float) -> None:
    assert learning_rate(section(), index) == pytest.approx(PEAK * part)


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [("constant", 1.0, 1.0), ("linear", FLOOR + (1 - FLOOR) / 2, FLOOR), ("cosine", FLOOR + (1 - FLOOR) / 2, FLOOR)],
)
def test_decay_in_the_middle_at_the_horizon_and_far_past_it(schedule: str, middle: float, end: float) -> None:
    values = [learning_rate(section(schedule), index) for index in (60, 110, 900_000)]
    assert values == [pytest.approx(PEAK * middle), pytest.approx(PEAK * end), pytest.approx(PEAK * end)]


def test_a_quarter_of_the_cosine_is_where_the_paper_puts_it() -> None:
    expected = PEAK * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(section(), 35) == pytest.approx(expected)


def test_asking_for_more_steps_later_does_not_bend_the_curve() -> None:
    assert [learning_rate(section(max_steps=500_000), index) for index in range(200)] == [
        learning_rate(section(), index) for index in range(200)
    ]


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 50),
    horizon=st.integers(1, 200),
    index=st.integers(0, 1_000_000),
)
def test_it_is_positive_never_above_the_peak_and_never_rises_after_warm_up(schedule: str, warmup: int, horizon: int, index: int) -> None:
    """Also where warm-up is longer than the horizon."""
    training = section(schedule, warmup, horizon)
    value = learning_rate(training, index)
    assert 0 < value <= PEAK * (1 + 1e-12)
    if index >= warmup:
        assert learning_rate(training, index + 1) <= value * (1 + 1e-12)
