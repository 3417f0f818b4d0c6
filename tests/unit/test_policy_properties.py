"""Properties of the policy engine over arbitrary advice, health and history: total, bounded, deterministic, recomputable."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mem_core.core.policy.directive_parser import parse_directive
from mem_core.core.policy.local_policy_engine import LocalPolicyEngine, decision_inputs, recompute
from mem_core.domain.directive import ExecutiveDirective
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import PolicyDecided
from mem_core.domain.plan import CandidatePlan, Hyperparams, MemoryPlan
from mem_core.domain.policy import BUILT_IN_BOUNDS, PolicyDecision, PolicyHistory, SegmentHealth
from mem_core.domain.request import RuntimeRequest

ENGINE = LocalPolicyEngine()
CPU = EnvironmentReport(
    device="cpu", device_reason="", dtype="float32", num_cores=2, threads_per_rank=1, versions={}, memory=(), findings=()
)
PLAN = CandidatePlan(segment_index=2, from_step=20, until_step=30, hyperparams=Hyperparams(), memory=MemoryPlan(micro_batch_rows=4))
REQUESTS = {
    required: RuntimeRequest.model_validate({"run_id": "demo", "policy": {"approval": {"required": required}}})
    for required in (True, False)
}

NUMBERS = st.none() | st.floats() | st.integers()
DIRECTIVES = st.none() | st.builds(
    ExecutiveDirective.model_construct, lr_multiplier=NUMBERS, gradient_clip_norm=NUMBERS, loss_scale_initial_power=NUMBERS
)
JSON_OBJECTS = st.dictionaries(
    st.sampled_from(["lr_multiplier", "gradient_clip_norm", "loss_scale_initial_power"]) | st.text(max_size=5),
    st.recursive(NUMBERS | st.booleans() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=2), max_leaves=3),
    max_size=4,
)
REPLIES = st.binary(max_size=200) | JSON_OBJECTS.map(lambda value: json.dumps(value).encode())
ADVICE = DIRECTIVES | REPLIES.map(parse_directive)
POSITIVE = st.floats(1e-6, 1e3)
VALUES = st.builds(Hyperparams, lr_multiplier=POSITIVE, gradient_clip_norm=POSITIVE, loss_scale_initial_power=st.integers(0, 32))
HEALTH = st.builds(
    SegmentHealth,
    loss_last=st.none() | st.floats(),
    skipped_steps=st.integers(0, 2),
    loss_spike=st.booleans(),
    memory_used_fraction=st.none() | st.floats(),
)
HISTORY = st.builds(
    PolicyHistory,
    current=st.none() | VALUES,
    before_change=st.none() | VALUES,
    cool_down_until_segment=st.integers(0, 4),
    canary_until_segment=st.none() | st.integers(0, 4),
    canary_baseline_loss=st.none() | st.floats(allow_nan=False),
)
APPROVALS = st.sampled_from(["granted", "refused", "timed_out", "not_asked"])


def check_total_bounded_and_recomputable(advice: Any, health: SegmentHealth, before: PolicyHistory, approval: Any, required: bool) -> None:
    asked = REQUESTS[required]
    arguments = (asked, CPU, advice, health, before, approval)
    decision = ENGINE.evaluate(asked, PLAN, *arguments[1:])
    lane, own, applied = BUILT_IN_BOUNDS.cpu, Hyperparams(), decision.applied_hyperparams
    for name in Hyperparams.model_fields:
        bound, value = getattr(lane, name), getattr(applied, name)
        known = [getattr(values, name) for values in (own, before.current, before.before_change) if values is not None]
        assert bound.at_least <= value <= bound.at_most or value in known
    if not isinstance(advice, ExecutiveDirective) and not health.unstable and before.canary_until_segment is None:
        assert applied == own
    assert ENGINE.evaluate(asked, PLAN, *arguments[1:]) == decision
    recorded = PolicyDecided(segment_index=2, plan=PLAN, inputs=decision_inputs(ENGINE, *arguments), decision=decision)
    assert recompute(PolicyDecided.model_validate_json(recorded.model_dump_json())) == decision
    assert PolicyDecision.model_validate_json(decision.model_dump_json()) == decision


@given(ADVICE, HEALTH, HISTORY, APPROVALS, st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_input_gives_one_bounded_recomputable_decision(
    advice: Any, health: SegmentHealth, before: PolicyHistory, approval: Any, required: bool
) -> None:
    check_total_bounded_and_recomputable(advice, health, before, approval, required)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@given(ADVICE, HEALTH, HISTORY, APPROVALS, st.booleans())
@settings(max_examples=100_000, deadline=None)
def test_every_input_gives_one_bounded_recomputable_decision_100_000_times(
    advice: Any, health: SegmentHealth, before: PolicyHistory, approval: Any, required: bool
) -> None:
    check_total_bounded_and_recomputable(advice, health, before, approval, required)
