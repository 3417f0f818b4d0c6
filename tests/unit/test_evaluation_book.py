"""Which evaluated step is the best, when patience is at its end, and what of it a rollback takes back."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from mem_core.core.recovery.actions import Evaluate, Finish, Pause, Progress, Train
from mem_core.core.recovery.mem_orchestrator import MemOrchestrator
from mem_core.core.results.evaluations import EvaluationBook, metric_of
from mem_core.core.run.reconcile import reconcile
from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.events import CheckpointCommitted, CheckpointJudged, CheckpointRemoved, Evaluated, RunStoppedEarly, SegmentStarted
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.evaluation import SetFigures, StoppedEarly


def evaluated(step: int, loss: float, name: str = "validation") -> Evaluated:
    return Evaluated(step=step, validation_loss=loss, sets={name: SetFigures.of(loss, 0.5, 10, 2, 2)})


def committed(step: int) -> CheckpointCommitted:
    return CheckpointCommitted(step=step, size_bytes=1, duration_s=0.1)


def book(*losses: float) -> EvaluationBook:
    """Evaluations after 10, 20, … steps."""
    made = EvaluationBook()
    for number, loss in enumerate(losses, start=1):
        made.add(evaluated(10 * number, loss))
        made.add(committed(10 * number))
    return made


def test_nothing_is_best_before_the_first_evaluation() -> None:
    assert (book().best(), book().held(), book().newest, book().stop_due(0, 1)) == (None, frozenset(), None, None)


def test_the_lowest_loss_is_best_and_of_two_the_earlier_one() -> None:
    best = book(3.0, 2.0, 2.5, 2.0).best()
    assert best is not None
    assert (best.step, best.metric, best.value) == (20, "validation/loss", 2.0)
    assert book(3.0, 2.0, 2.5).held() == {20}


@pytest.mark.parametrize(
    ("losses", "patience", "stops"),
    [
        ((3.0,), 1, False), ((3.0, 2.0), 1, False), ((3.0, 3.0), 1, True), ((3.0, 2.0, 2.5), 2, False), ((3.0, 2.0, 2.5, 2.1), 2, True),
        ((3.0, 2.0, 2.5, 1.9), 2, False), ((3.0, 4.0, 5.0), None, False),
    ],
)  # fmt: skip
def test_patience_counts_evaluations_without_a_lower_loss(losses: Sequence[float], patience: int | None, stops: bool) -> None:
    step = 10 * len(losses)
    assert book(*losses).stop_due(step, patience) == (StoppedEarly(step=step, metric="validation/loss") if stops else None)


def test_a_step_that_was_not_evaluated_stops_nothing() -> None:
    assert book(1.0, 2.0).stop_due(25, 1) is None


def test_work_that_goes_on_from_before_forgets_what_came_after() -> None:
    made = book(3.0, 1.0, 2.0)
    made.add(RunStoppedEarly(stopped=StoppedEarly(step=30, metric="validation/loss")))
    made.add(SegmentStarted(segment_index=1, from_step=10, until_step=20))
    assert made.stopped_early is None
    assert [event.step for event in made.in_order] == [10]
    made.add(evaluated(20, 1.5))
    assert made.is_evaluated(20)
    assert not made.is_evaluated(30)


def test_a_step_without_a_checkpoint_is_no_candidate_and_a_rotated_one_still_is() -> None:
    made = book(3.0, 1.0)
    made.add(evaluated(30, 0.5))
    made.add(CheckpointRemoved(step=10, reason="rotation"))
    best = made.best()
    assert best is not None
    assert best.step == 20, "step 30 was never committed"
    made.add(
        CheckpointJudged(verdict=CheckpointVerdict(step=20, manifest_sha256="a", valid=False, level="integrity", reasons=("damaged",)))
    )
    assert made.held() == {10}
    assert made.is_evaluated(20)
    made.add(committed(20))
    assert made.held() == {20}, "it was saved again"


def test_the_first_set_decides() -> None:
    assert metric_of(evaluated(1, 2.0, "held-out")) == "held-out/loss"
    assert metric_of(Evaluated(step=1, validation_loss=2.0)) == "validation/loss", "as older journals wrote it"


def test_a_perplexity_is_always_a_number() -> None:
    assert math.isfinite(SetFigures.of(5_000.0, None, 1, 1, 1).perplexity)
    words = SetFigures.of(1.2345, 0.612, 10, 1_107, 1_107).words()
    assert words == "loss 1.2345, perplexity 3.437, 61.2% of tokens right, over 1,107 rows"


# -- when it is due ----------------------------------------------------------------------------------------------------------


def limits(every_steps: int | None) -> MemOrchestrator:
    return MemOrchestrator(max_steps=100, segment_steps=30, max_failures_without_progress=3, evaluate_every_steps=every_steps)


def at(step: int, **more: Any) -> Progress:
    return Progress(applied_steps=step, validated_step=step, **more)


@pytest.mark.parametrize(
    ("every_steps", "from_step", "until_step"), [(None, 0, 30), (20, 0, 20), (20, 20, 30), (20, 30, 40), (50, 90, 100), (500, 60, 90)]
)
def test_a_segment_ends_where_an_evaluation_is_due(every_steps: int | None, from_step: int, until_step: int) -> None:
    action = limits(every_steps).next_action(at(from_step, is_evaluated=True), None)
    assert action == Train(segment_index=from_step // 30, from_step=from_step, until_step=until_step)


def test_an_evaluation_is_due_where_it_has_not_been_done() -> None:
    assert limits(20).next_action(at(40, is_evaluated=False), None) == Evaluate(40)
    assert isinstance(limits(20).next_action(at(40, is_evaluated=True), None), Train)
    assert isinstance(limits(20).next_action(at(30, is_evaluated=False), None), Train), "the end of a segment is not enough"
    assert isinstance(limits(20).next_action(at(0, is_evaluated=False), None), Train), "an untrained model is not evaluated"


def test_who_asks_for_an_end_is_not_made_to_wait_for_an_evaluation() -> None:
    assert limits(20).next_action(at(40, is_evaluated=False, stop_by="SIGTERM"), None) == Pause("SIGTERM")


def test_the_last_step_and_the_end_of_patience_finish() -> None:
    assert limits(20).next_action(at(100, is_evaluated=False), None) == Finish()
    assert limits(20).next_action(at(40, is_evaluated=True, stops_early=True), None) == Finish()


# -- what may be asked for ---------------------------------------------------------------------------------------------------


def request(evaluation: dict[str, Any], **sections: Any) -> RuntimeRequest:
    return RuntimeRequest.model_validate({"run_id": "run", "evaluation": evaluation} | sections)


@pytest.mark.parametrize(
    ("evaluation", "named"),
    [
        ({"keep_best": True}, "every_steps"), ({"patience": 2}, "every_steps"), ({"every_steps": 0}, "every_steps"),
        ({"sets": {"Bad Name!": ["a"]}}, "Bad Name!"), ({"sets": {"validation": ["a"]}}, "data.validation"), ({"sets": {"a": []}}, "empty"),
        ({"every_steps": True}, "every_steps"), ({"prompt": 1}, "prompt"), ({"max_rows": 0}, "max_rows"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(evaluation: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        request(evaluation)


def test_an_evaluation_without_rows_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"data\.validation or evaluation\.sets"):
        request({"every_steps": 10}, data={"validation": None})
    assert request({"every_steps": 10, "sets": {"own": "a.txt"}}, data={"validation": None}).evaluation.sets == {"own": ("a.txt",)}


def test_evaluations_are_no_more_than_segments_may_be() -> None:
    asked = request({"every_steps": 1}, training={"max_steps": 50_000})
    assert asked.effective_evaluation_steps == 50
    assert request({}).effective_evaluation_steps is None


def test_a_run_may_go_on_with_other_evaluations() -> None:
    stored = request({}, training={"schedule_steps": 1_000_000})
    going_on = reconcile(stored, request({"every_steps": 10, "patience": 3, "keep_best": True}))
    assert going_on.evaluation.patience == 3
