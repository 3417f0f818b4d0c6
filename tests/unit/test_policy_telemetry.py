"""Health and summary depend on the committed trajectory alone, however often a segment was interrupted or done again."""

from typing import Any

import pytest

from mem_core.core.policy.directive_parser import parse_directive, read_advice, reply_text
from mem_core.core.policy.history import history_for
from mem_core.core.policy.local_policy_engine import LocalPolicyEngine
from mem_core.core.policy.telemetry import health_for, segments_since_change, summary_for
from mem_core.domain.directive import ExecutiveDirective, Refusal
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import PolicyDecided, SegmentEnded
from mem_core.domain.plan import CandidatePlan, Hyperparams, MemoryPlan
from mem_core.domain.policy import BUILT_IN_BOUNDS
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted
from mem_core.infrastructure.planner.rules import RulesPlanner

LANE = BUILT_IN_BOUNDS.cpu
REQUEST = RuntimeRequest.model_validate({"run_id": "demo", "training": {"max_steps": 1_000}})
CPU = EnvironmentReport(
    device="cpu", device_reason="", dtype="float32", num_cores=2, threads_per_rank=1, versions={}, memory=(), findings=()
)


def ended(index: int, loss: float, skipped: int = 0, from_step: int | None = None, **values: Any) -> SegmentEnded:
    """Segment `index` of ten steps; `skipped` is the total up to its end."""
    outcome = SegmentCompleted(
        from_step=index * 10 if from_step is None else from_step,
        to_step=index * 10 + 10,
        batch_index=index * 10 + 10 + skipped,
        loss_first=values.pop("loss_first", loss),
        loss_last=loss,
        tokens=1,
        duration_s=values.pop("duration_s", 1.0),
        trajectory_digest="",
    )
    return SegmentEnded(segment_index=index, outcome=outcome)


def test_an_interrupted_and_repeated_segment_counts_once_and_looks_undisturbed() -> None:
    calm = [ended(0, 3.0), ended(1, 2.5, skipped=2)]
    disturbed = [
        ended(0, 3.0, duration_s=9.0),
        ended(0, 3.0),
        SegmentEnded(segment_index=1, outcome=SegmentInterrupted(by="signal", to_step=14)),
        ended(1, 2.5, skipped=2, from_step=14, loss_first=2.7, duration_s=99.0),
    ]
    assert health_for(calm, 2, LANE) == health_for(disturbed, 2, LANE)
    assert health_for(calm, 2, LANE).skipped_steps == 2
    assert health_for([*calm, ended(2, 2.4, skipped=2)], 3, LANE).skipped_steps == 0
    assert summary_for(calm, 2, REQUEST, LANE) == summary_for(disturbed, 2, REQUEST, LANE)


def test_only_segments_before_the_asked_one_count() -> None:
    events = [ended(0, 3.0), ended(1, 2.5), ended(2, 9.0)]
    assert summary_for(events, 2, REQUEST, LANE).losses == (3.0, 2.5)
    assert health_for(events, 0, LANE).loss is None


@pytest.mark.parametrize(("loss", "spike"), [(4.4, False), (4.6, True), (2.0, False)])
def test_a_jump_of_the_loss_is_instability(loss: float, spike: bool) -> None:
    assert health_for([ended(0, 3.0), ended(1, loss)], 2, LANE).unstable is spike


def test_a_loss_that_is_not_a_number_is_instability() -> None:
    assert health_for([ended(0, 3.0), ended(1, float("nan"))], 2, LANE).unstable


def test_a_mean_stands_for_the_segment_where_it_is_known() -> None:
    events = [ended(0, 3.0), ended(1, 2.5)]
    assert (health_for(events, 2, LANE).loss, health_for(events, 2, LANE, loss_mean=2.7).loss) == (2.5, 2.7)
    assert health_for(events, 2, LANE, loss_mean=float("inf")).unstable


def run_with_rules(losses: list[float], stop_after: int | None = None) -> list[Any]:
    """Decide and 'train' segment by segment with the rules planner; a stop forgets everything but the journal."""
    events: list[Any] = []
    for index, loss in enumerate(losses[:stop_after]):
        decide_next(events, index)
        events.append(ended(index, loss))
    return events


def decide_next(events: list[Any], index: int) -> None:
    reply = RulesPlanner().advise(summary_for(events, index, REQUEST, LANE, tokens_per_s=float(index)))
    engine = LocalPolicyEngine()
    rest = (CPU, read_advice(reply), health_for(events, index, LANE), history_for(events, index))
    plan = CandidatePlan(
        segment_index=index,
        from_step=index * 10,
        until_step=index * 10 + 10,
        hyperparams=Hyperparams(),
        memory=MemoryPlan(micro_batch_rows=1),
    )
    decision = engine.evaluate(REQUEST, plan, *rest)
    inputs = engine.inputs(REQUEST, *rest).model_dump(mode="json")
    events.append(PolicyDecided(segment_index=index, plan=plan, directive_text=reply_text(reply), inputs=inputs, decision=decision))


LOSSES = [4.0, 3.0, *[3.0] * 9, 3.8, 2.9, 2.8, 2.7, 2.6]


def multipliers(events: list[Any]) -> list[float]:
    return [event.decision.applied_hyperparams.lr_multiplier for event in events if isinstance(event, PolicyDecided)]


def test_rules_on_a_plateau_and_a_jump_apply_lower_rates_that_stay() -> None:
    events = run_with_rules(LOSSES)
    assert multipliers(events) == [1.0] * 7 + [0.5] * 5 + [0.25] * 4
    assert segments_since_change(events, len(LOSSES)) == 4


@pytest.mark.parametrize("stop", range(1, len(LOSSES)))
def test_a_resume_from_the_journal_decides_like_an_undisturbed_run(stop: int) -> None:
    events = [type(event).model_validate_json(event.model_dump_json()) for event in run_with_rules(LOSSES, stop)]
    for index in range(stop, len(LOSSES)):
        decide_next(events, index)
        events.append(ended(index, LOSSES[index], duration_s=7.0))
    assert multipliers(events) == multipliers(run_with_rules(LOSSES))


def test_nothing_changed_means_no_age() -> None:
    assert segments_since_change([], 3) is None
    assert segments_since_change(run_with_rules([4.0, 3.0, 2.0]), 3) is None


def test_replies_are_read_and_kept() -> None:
    late = Refusal(reason="late")
    assert (read_advice(None), read_advice(late), read_advice(b'{"lr_multiplier": 0.5}')) == (
        None, late, ExecutiveDirective(lr_multiplier=0.5),
    )  # fmt: skip
    assert (reply_text(None), reply_text(late), reply_text(b"\xffabc", 3)) == (None, None, "\ufffdab")
    assert parse_directive(reply_text(b'{"lr_multiplier": 0.5}') or "") == ExecutiveDirective(lr_multiplier=0.5)
