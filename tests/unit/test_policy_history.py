"""History is a fold over recorded decisions: cool-down, canary and revert come from it, and a resume sees the same."""

from typing import Any

from mem_core.core.policy.history import advance, history_for, recorded_decision
from mem_core.core.policy.local_policy_engine import LocalPolicyEngine, recompute
from mem_core.domain.directive import ExecutiveDirective, Refusal
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import Noted, PolicyDecided
from mem_core.domain.plan import CandidatePlan, Hyperparams, MemoryPlan
from mem_core.domain.policy import LaneBounds, PolicyBounds, SegmentHealth
from mem_core.domain.request import RuntimeRequest

CPU = EnvironmentReport(
    device="cpu", device_reason="asked for", dtype="float32", num_cores=2, threads_per_rank=2, versions={}, memory=(), findings=()
)
REQUEST = RuntimeRequest.model_validate({"run_id": "demo"})


class Script:
    """Runs decisions segment by segment, each from the history of the recorded ones, as the flow does."""

    def __init__(self, **lane: Any) -> None:
        self.engine = LocalPolicyEngine(PolicyBounds(cpu=LaneBounds(lane="cpu_mem_lane", **lane)))
        self.events: list[Any] = [Noted(text="start")]

    def decide(self, advice: ExecutiveDirective | Refusal | None, loss: float = 2.0, **health: Any) -> tuple[str, float]:
        index = sum(isinstance(event, PolicyDecided) for event in self.events)
        plan = CandidatePlan(
            segment_index=index, from_step=index, until_step=index + 1, hyperparams=Hyperparams(), memory=MemoryPlan(micro_batch_rows=1)
        )
        arguments = (REQUEST, CPU, advice, SegmentHealth(loss_last=loss, **health), history_for(self.events, index))
        decision = self.engine.evaluate(REQUEST, plan, *arguments[1:])
        inputs = self.engine.inputs(*arguments).model_dump(mode="json")
        self.events.append(PolicyDecided(segment_index=index, plan=plan, inputs=inputs, decision=decision))
        return decision.reason, decision.applied_hyperparams.lr_multiplier


def lr(multiplier: float) -> ExecutiveDirective:
    return ExecutiveDirective(lr_multiplier=multiplier)


def test_a_change_is_followed_by_its_cool_down() -> None:
    script = Script(cool_down_segments=2)
    assert script.decide(lr(0.5)) == ("accepted", 0.5)
    assert script.decide(lr(0.4)) == ("cool_down", 0.5)
    assert script.decide(lr(0.4)) == ("cool_down", 0.5)
    assert script.decide(lr(0.4)) == ("accepted", 0.4)


def test_the_same_directive_every_segment_never_compounds() -> None:
    script = Script()
    assert [script.decide(lr(0.5))[1] for _ in range(6)] == [0.5] * 6


def test_a_directive_lasts_for_its_segment() -> None:
    script = Script()
    assert [script.decide(advice)[1] for advice in (lr(0.5), None, Refusal(reason="late"))] == [0.5, 1.0, 1.0]


def test_a_harmful_change_is_reverted_and_then_left_alone_for_longer() -> None:
    script = Script(cool_down_segments=0, revert_cool_down_segments=2)
    assert script.decide(lr(0.8)) == ("accepted", 0.8)
    assert script.decide(lr(0.5), loss=2.0) == ("accepted", 0.5)
    assert script.decide(lr(0.5), loss=3.0) == ("canary_reverted", 0.8)
    assert script.decide(lr(0.5), loss=3.0) == ("cool_down", 0.8)
    assert script.decide(lr(0.5), loss=3.0) == ("cool_down", 0.8)
    assert script.decide(lr(0.5), loss=3.0) == ("accepted", 0.5)


def test_only_the_canary_segments_judge_a_change() -> None:
    script = Script(canary_segments=1)
    assert script.decide(lr(0.5), loss=2.0) == ("accepted", 0.5)
    assert script.decide(lr(0.5), loss=2.0) == ("accepted", 0.5)
    assert script.decide(lr(0.5), loss=9.0) == ("accepted", 0.5)


def test_a_canary_of_several_segments_judges_each_of_them() -> None:
    script = Script(canary_segments=3)
    assert [script.decide(lr(0.5), loss=loss)[0] for loss in (2.0, 2.0, 2.0, 9.0)] == ["accepted"] * 3 + ["canary_reverted"]


def test_a_canary_of_no_segments_never_reverts() -> None:
    script = Script(canary_segments=0)
    assert [script.decide(lr(0.5), loss=loss)[0] for loss in (2.0, 9.0, 99.0)] == ["accepted"] * 3


def test_an_expired_change_is_not_judged() -> None:
    script = Script()
    assert script.decide(lr(0.5), loss=2.0) == ("accepted", 0.5)
    assert script.decide(None, loss=2.0) == ("no_directive", 1.0)
    assert script.decide(None, loss=9.0) == ("no_directive", 1.0)


def test_after_instability_the_default_waits_until_the_run_is_calm() -> None:
    script = Script()
    assert script.decide(lr(0.5)) == ("accepted", 0.5)
    assert script.decide(None, skipped_steps=2) == ("no_directive", 0.5)
    assert script.decide(None) == ("no_directive", 1.0)


def test_a_refused_request_leaves_no_history() -> None:
    engine = LocalPolicyEngine()
    cuda = RuntimeRequest.model_validate({"run_id": "demo", "device": "cuda"})
    plan = CandidatePlan(segment_index=0, from_step=0, until_step=1, hyperparams=Hyperparams(), memory=MemoryPlan(micro_batch_rows=1))
    inputs = engine.inputs(cuda, CPU)
    assert advance(inputs, engine.evaluate(cuda, plan, CPU), 0) == inputs.history


def test_recorded_decisions_are_found_and_recomputed() -> None:
    script = Script()
    for advice in (lr(1.4), None, lr(0.5)):
        script.decide(advice)
    decided = [event for event in script.events if isinstance(event, PolicyDecided)]
    for event in decided:
        assert recompute(PolicyDecided.model_validate_json(event.model_dump_json())) == event.decision
        assert recorded_decision(script.events, event.segment_index) == event.decision
    assert recorded_decision(script.events, 3) is None
    assert history_for(script.events, 2) == advance(
        script.engine.inputs(REQUEST, CPU, None, SegmentHealth(loss_last=2.0), history_for(script.events, 1)), decided[1].decision, 1
    )
