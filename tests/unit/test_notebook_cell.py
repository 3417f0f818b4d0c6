"""The cell of a run in a notebook: what stands in it at the end, and where there is nothing to show."""

from typing import Any

import pytest

from flows.notebook import NotebookProgress, show_ending
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.progress import ProgressView

DONE = RunResult(status="completed", run_id="a", applied_steps=60, loss_last=2.5)


class State:
    """A flow run's final state, as far as the cell asks it."""

    def __init__(self, name: str, value: Any = None) -> None:
        self._name, self._value = name, value

    def is_completed(self) -> bool:
        return self._name == "completed"

    def is_cancelled(self) -> bool:
        return self._name == "cancelled"

    def result(self, _sync: bool) -> Any:
        return self._value


def ended_with(state: State, view: ProgressView | None) -> str:
    progress = NotebookProgress()
    if view is not None:
        progress.update(view)
    show_ending(progress, state)
    return progress.html()


UNDER_WAY = ProgressView(48, 60, loss=2.75, validated_step=48, phase="idle")


def test_a_completed_run_ends_at_its_last_step_which_is_proven() -> None:
    text = ended_with(State("completed", DONE), UNDER_WAY)
    assert "step 60/60 100.0% · completed · loss 2.7500 · validated 60" in text
    assert "width:100.0%" in text
    assert "idle" not in text


def test_a_run_that_showed_nothing_on_the_way_still_says_how_it_ended() -> None:
    assert "step 60/60 100.0% · completed · loss 2.5000 · validated 60" in ended_with(State("completed", DONE), None)


@pytest.mark.parametrize(("state", "word"), [("cancelled", "interrupted"), ("failed", "failed")])
def test_an_ending_on_the_way_keeps_the_step_that_was_reached(state: str, word: str) -> None:
    text = ended_with(State(state), UNDER_WAY)
    assert f"step 48/60 80.0% · {word} · loss 2.7500 · validated 48" in text


def test_a_flow_without_steps_has_no_empty_bar() -> None:
    """The doctor and the drills train nothing in this process."""
    text = ended_with(State("completed", [{"valid": True}]), None)
    assert ("width:420px" in text, "starting" in text, "completed" in text) == (False, False, True)
