"""Epochs and a share for warm-up become steps once the data are known, and a run that goes on keeps what it was born with."""

from typing import Any

import pytest
from pydantic import ValidationError

from mem_core.core.results.length import (
    RunLength,
    epochs_of,
    going_on_in_steps,
    in_steps,
    length_of,
    length_words,
    refuse_epochs,
    steps_of,
)
from mem_core.core.run.reconcile import reconcile
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest

ROWS = 1_000


def request(**training: Any) -> RuntimeRequest:
    return RuntimeRequest.model_validate({"run_id": "run", "training": training})


def born(**training: Any) -> tuple[RunLength, RuntimeRequest]:
    """As run.json holds it: the length as asked, the request in steps with its horizon frozen."""
    asked = request(**training)
    made = in_steps(asked, ROWS)
    horizon = made.training.schedule_steps or made.training.max_steps
    return length_of(asked, ROWS), made.model_copy(update={"training": made.training.model_copy(update={"schedule_steps": horizon})})


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"),
    [
        (1, 8, 8, 1), (1, 9, 8, 2), (3, 1_000, 8, 375), (0.5, 1_000, 8, 63), (0.1, 100, 10, 1), (0.3, 100, 10, 3), (0.001, 8, 8, 1),
        (2.5, 7, 2, 9),
    ],
)  # fmt: skip
def test_epochs_are_whole_batches_rounded_up(epochs: float, rows: int, batch: int, steps: int) -> None:
    assert steps_of(epochs, rows, batch) == steps
    assert epochs_of(steps, rows, batch) >= min(epochs, steps * batch / rows)


def test_a_request_in_epochs_becomes_one_in_steps() -> None:
    made = in_steps(request(epochs=3, warmup_ratio=0.1), ROWS)
    same = request(max_steps=375, warmup_steps=38)
    assert made == same, "what trains is a request in steps like any other"
    assert RuntimeRequest.model_validate(made.model_dump(mode="json")) == made


def test_a_request_in_steps_stays_as_it_is() -> None:
    asked = request(max_steps=60)
    assert in_steps(asked, ROWS) is asked
    assert going_on_in_steps(RunLength(), asked, asked) is asked


def test_a_share_for_warm_up_is_of_the_schedule() -> None:
    assert in_steps(request(max_steps=100, schedule_steps=400, warmup_ratio=0.05), ROWS).training.warmup_steps == 20
    assert in_steps(request(max_steps=100, warmup_ratio=0), ROWS).training.warmup_steps == 0


@pytest.mark.parametrize(
    ("training", "named"),
    [
        ({"epochs": 2, "max_steps": 60}, ("epochs", "max_steps")),
        ({"warmup_ratio": 0.1, "warmup_steps": 7}, ("warmup_ratio", "warmup_steps")),
    ],
)
def test_both_of_two_are_refused_by_name(training: dict[str, Any], named: tuple[str, str]) -> None:
    with pytest.raises(ValidationError) as caught:
        request(**training)
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize("epochs", [0, -1, float("nan"), float("inf"), True, "many", 1e9])
def test_what_is_no_number_of_epochs_is_refused(epochs: Any) -> None:
    with pytest.raises(ValidationError):
        request(epochs=epochs)


def test_a_request_in_epochs_survives_being_stored_and_sent() -> None:
    asked = request(epochs=2.5, warmup_ratio=0.1)
    assert RuntimeRequest.model_validate_json(asked.model_dump_json()) == asked


def test_more_epochs_go_on_with_the_warm_up_and_the_horizon_of_birth() -> None:
    length, stored = born(epochs=2, warmup_ratio=0.1)
    asked = going_on_in_steps(length, stored, request(epochs=4, warmup_ratio=0.1))
    going_on = reconcile(stored, asked)
    assert (going_on.training.max_steps, going_on.training.warmup_steps, going_on.training.schedule_steps) == (500, 25, 250)


def test_more_steps_of_a_run_that_was_born_in_epochs_just_go_on() -> None:
    length, stored = born(epochs=2, warmup_ratio=0.1)
    asked = going_on_in_steps(length, stored, request(max_steps=900, warmup_ratio=0.1))
    assert reconcile(stored, asked).training.max_steps == 900


def test_another_share_for_warm_up_is_refused_by_name() -> None:
    length, stored = born(epochs=2, warmup_ratio=0.1)
    with pytest.raises(RequestError, match=r"training\.warmup_ratio: run run was born with training\.warmup_ratio 0\.1") as caught:
        going_on_in_steps(length, stored, request(epochs=2, warmup_ratio=0.2))
    assert caught.value.exit_code == 64


def test_a_share_that_nobody_asked_for_stays_as_born() -> None:
    _, stored = born(max_steps=100, warmup_steps=10)
    asked = going_on_in_steps(RunLength(num_rows=ROWS), stored, request(epochs=2, warmup_ratio=0.5), ("training.warmup_steps",))
    assert (asked.training.warmup_steps, asked.training.max_steps) == (10, 250)


def test_epochs_of_a_run_of_an_older_version_are_refused_with_the_way_out() -> None:
    stored = request(max_steps=100)
    with pytest.raises(RequestError, match=r"training\.epochs.*did not keep.*training\.max_steps"):
        going_on_in_steps(RunLength(), stored, request(epochs=2))


def test_epochs_beyond_the_limit_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"training\.epochs: these epochs of 1000 rows are 1250 steps.*max_steps_limit 1000"):
        in_steps(request(epochs=10, max_steps_limit=1_000), ROWS)


def test_what_plans_over_steps_refuses_epochs_by_name() -> None:
    refuse_epochs(request(max_steps=9), "a drill")
    with pytest.raises(RequestError, match=r"training\.epochs: a drill plans over steps.*Ask for training\.max_steps"):
        refuse_epochs(request(epochs=1), "a drill")


def test_what_followed_is_said_in_words() -> None:
    length, stored = born(epochs=3, warmup_ratio=0.1)
    assert length_words(length, stored) == "3 epochs of 1,000 rows are 375 steps of 8 rows, 38 of them warm-up"
    assert length_words(length_of(request(max_steps=5), ROWS), request(max_steps=5)) == ""


def test_a_cap_on_segments_is_not_taken_from_steps_that_are_not_known() -> None:
    asked = request(epochs=1, segment_steps=20)
    assert asked.effective_segment_steps == 20
    assert in_steps(asked, 2_000_000).effective_segment_steps == 250
