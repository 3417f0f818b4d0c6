"""The zero-trust gate: deterministic clamps and refusals (I7)."""

from typing import Any

import pytest

from mem_core.core.policy.explain import explain_decision
from mem_core.core.policy.local_policy_engine import LocalPolicyEngine
from mem_core.core.policy.rules import decide
from mem_core.domain.directive import ExecutiveDirective, Refusal
from mem_core.domain.environment import EnvironmentReport, Finding
from mem_core.domain.plan import CandidatePlan, Hyperparams, MemoryPlan
from mem_core.domain.policy import HEALTHY, NO_HISTORY, PolicyHistory, PolicyInputs, SegmentHealth
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.deepspeed.engine_config import engine_config
from mem_core.runtime.session.opening.wiring import fresh_position

ENGINE = LocalPolicyEngine()
GREEDY = ExecutiveDirective(lr_multiplier=1.4, gradient_clip_norm=5.0, loss_scale_initial_power=16)
FOUR_ROWS = MemoryPlan(micro_batch_rows=4)
UNSTABLE = SegmentHealth(skipped_steps=1)


def request(**changes: Any) -> RuntimeRequest:
    return RuntimeRequest.model_validate({"run_id": "demo", **changes})


def environment(device: str = "cpu", dtype: str = "float32", findings: tuple[Finding, ...] = ()) -> EnvironmentReport:
    return EnvironmentReport.model_validate(
        {
            "device": device, "device_reason": "asked for", "dtype": dtype, "num_cores": 2, "threads_per_rank": 2,
            "versions": {}, "memory": (), "findings": findings,
        }
    )  # fmt: skip


def plan(segment_index: int = 0, memory: MemoryPlan = FOUR_ROWS) -> CandidatePlan:
    from_step = segment_index * 10
    return CandidatePlan(
        segment_index=segment_index, from_step=from_step, until_step=from_step + 10, hyperparams=Hyperparams(), memory=memory
    )


def history(**values: Any) -> PolicyHistory:
    return PolicyHistory.model_validate(values)


@pytest.mark.parametrize(
    ("device", "dtype", "lane", "not_applicable"),
    [
        ("cuda", "float16", "v89_real_chaos_mem_lane", ()),
        ("cuda", "bfloat16", "v89_real_chaos_mem_lane", ("loss_scale_initial_power",)),
        ("cpu", "float32", "cpu_mem_lane", ("loss_scale_initial_power",)),
    ],
)
def test_reference_example(device: str, dtype: str, lane: str, not_applicable: tuple[str, ...]) -> None:
    decision = ENGINE.evaluate(request(), plan(), environment(device, dtype), GREEDY)
    assert decision.allow
    assert decision.reason == "clamped"
    assert decision.lane == lane
    assert decision.applied_hyperparams == Hyperparams(lr_multiplier=0.85, gradient_clip_norm=1.25, loss_scale_initial_power=10)
    assert [(clamp.field, clamp.proposed, clamp.applied) for clamp in decision.clamps] == [
        ("lr_multiplier", 1.4, 0.85), ("gradient_clip_norm", 5.0, 1.25), ("loss_scale_initial_power", 16.0, 10.0),
    ]  # fmt: skip
    assert decision.not_applicable == not_applicable
    assert decision.directive == {"lr_multiplier": 1.4, "gradient_clip_norm": 5.0, "loss_scale_initial_power": 16}


def test_low_values_are_raised_to_the_lower_bounds() -> None:
    low = ExecutiveDirective(lr_multiplier=-3.0, gradient_clip_norm=0.0, loss_scale_initial_power=-1)
    decision = ENGINE.evaluate(request(), plan(), environment(), low)
    assert decision.applied_hyperparams == Hyperparams(lr_multiplier=0.05, gradient_clip_norm=0.05, loss_scale_initial_power=0)
    assert {clamp.reason for clamp in decision.clamps} == {"below_bound"}


def test_without_a_directive_the_requests_own_values_hold_even_above_the_bounds_of_advice() -> None:
    asked = request(training={"gradient_clip_norm": 5.0, "loss_scale_initial_power": 16})
    decision = ENGINE.evaluate(asked, plan(), environment())
    assert (decision.allow, decision.reason, decision.clamps) == (True, "no_directive", ())
    assert decision.applied_hyperparams == Hyperparams(lr_multiplier=1.0, gradient_clip_norm=5.0, loss_scale_initial_power=16)


def test_absent_fields_keep_the_requests_own_values() -> None:
    asked = request(training={"gradient_clip_norm": 5.0})
    decision = ENGINE.evaluate(asked, plan(), environment(), ExecutiveDirective(lr_multiplier=0.5))
    assert decision.applied_hyperparams == Hyperparams(lr_multiplier=0.5, gradient_clip_norm=5.0)
    assert decision.reason == "accepted"


def test_cuda_asked_for_and_absent_refuses_the_request() -> None:
    decision = ENGINE.evaluate(request(device="cuda"), plan(), environment("cpu"), GREEDY)
    assert (decision.allow, decision.reason, decision.request_refused) == (False, "cuda_unavailable", True)
    assert decision.lane == "v89_real_chaos_mem_lane"
    assert decision.applied_hyperparams == Hyperparams()


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_other_devices_are_not_refused_on_a_cpu(device: str) -> None:
    assert ENGINE.evaluate(request(device=device), plan(), environment("cpu")).allow


def test_a_refused_reply_leaves_the_default_and_goes_on() -> None:
    refusal = Refusal(reason="late", detail="no reply within 10 s")
    decision = ENGINE.evaluate(request(), plan(), environment(), refusal)
    assert (decision.allow, decision.reason, decision.request_refused) == (False, "late", False)
    assert decision.applied_hyperparams == Hyperparams()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"lr_multiplier": float("nan")}, "non_finite"),
        ({"gradient_clip_norm": float("inf")}, "non_finite"),
        ({"loss_scale_initial_power": 10**400}, "non_finite"),
        ({"lr_multiplier": "0.5"}, "wrong_type"),
        ({"lr_multiplier": True}, "wrong_type"),
        ({"loss_scale_initial_power": 8.0}, "wrong_type"),
    ],
)
def test_values_smuggled_past_validation_are_refused_before_any_comparison(values: dict[str, Any], reason: str) -> None:
    """`min(nan, 0.85)` is nan: finiteness and type are tested again inside the engine."""
    smuggled = ExecutiveDirective.model_construct(**{"lr_multiplier": 0.5, **values})
    decision = ENGINE.evaluate(request(), plan(), environment(), smuggled)
    assert (decision.allow, decision.reason, decision.applied_hyperparams) == (False, reason, Hyperparams())


def test_multipliers_never_compound() -> None:
    """The same directive again means the same multiplier of the base schedule, not its square."""
    half = ExecutiveDirective(lr_multiplier=0.5)
    before = history(current=Hyperparams(lr_multiplier=0.5), cool_down_until_segment=9)
    decision = ENGINE.evaluate(request(), plan(4), environment(), half, HEALTHY, before)
    assert (decision.applied_hyperparams.lr_multiplier, decision.reason) == (0.5, "accepted")


def test_cool_down_keeps_the_current_values() -> None:
    before = history(current=Hyperparams(lr_multiplier=0.5), cool_down_until_segment=6)
    other = ExecutiveDirective(lr_multiplier=0.3)
    held = ENGINE.evaluate(request(), plan(5), environment(), other, HEALTHY, before)
    assert (held.allow, held.reason, held.applied_hyperparams.lr_multiplier) == (True, "cool_down", 0.5)
    assert [(clamp.proposed, clamp.applied, clamp.reason) for clamp in held.clamps] == [(0.3, 0.5, "cool_down")]
    taken = ENGINE.evaluate(request(), plan(6), environment(), other, HEALTHY, before)
    assert (taken.reason, taken.applied_hyperparams.lr_multiplier) == ("accepted", 0.3)


def test_cool_down_does_not_delay_a_lower_learning_rate_after_instability() -> None:
    before = history(current=Hyperparams(lr_multiplier=0.5), cool_down_until_segment=6)
    decision = ENGINE.evaluate(request(), plan(5), environment(), ExecutiveDirective(lr_multiplier=0.3), UNSTABLE, before)
    assert decision.applied_hyperparams.lr_multiplier == 0.3


@pytest.mark.parametrize("health", [UNSTABLE, SegmentHealth(non_finite=True), SegmentHealth(loss_spike=True)])
@pytest.mark.parametrize("advice", [None, Refusal(reason="late"), ExecutiveDirective(lr_multiplier=0.8), GREEDY])
def test_nothing_raises_the_learning_rate_after_instability(health: SegmentHealth, advice: ExecutiveDirective | Refusal | None) -> None:
    before = history(current=Hyperparams(lr_multiplier=0.4))
    decision = ENGINE.evaluate(request(), plan(9), environment(), advice, health, before)
    assert decision.applied_hyperparams == Hyperparams(lr_multiplier=0.4)
    assert "instability" in {clamp.reason for clamp in decision.clamps}
    lower = ENGINE.evaluate(request(), plan(9), environment(), ExecutiveDirective(lr_multiplier=0.2), health, before)
    assert lower.applied_hyperparams.lr_multiplier == 0.2


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_a_number_counts_as_instability(loss: float) -> None:
    health = SegmentHealth(loss_last=loss)
    assert (health.loss_last, health.unstable) == (None, True)


@pytest.mark.parametrize(
    ("health", "findings"),
    [
        (SegmentHealth(ooms_absorbed=1), ()),
        (SegmentHealth(memory_used_fraction=0.95), ()),
        (HEALTHY, (Finding(check="memory", severity="warning", observed="1 GiB", needed="2 GiB"),)),
    ],
)
def test_under_memory_pressure_nothing_raises_memory(health: SegmentHealth, findings: tuple[Finding, ...]) -> None:
    now = MemoryPlan(micro_batch_rows=2, micro_batch_tokens=512, activation_checkpointing=True, offload_optimizer="cpu")
    wish = plan(3, MemoryPlan(micro_batch_rows=0, micro_batch_tokens=1_024))
    decision = ENGINE.evaluate(request(), wish, environment(findings=findings), None, health, history(current_memory=now))
    assert decision.applied_memory == now
    assert {clamp.field for clamp in decision.clamps} == {
        "memory.micro_batch_rows", "memory.micro_batch_tokens", "memory.activation_checkpointing", "memory.offload_optimizer",
    }  # fmt: skip
    smaller = plan(3, MemoryPlan(micro_batch_rows=1, micro_batch_tokens=256, activation_checkpointing=True, offload_optimizer="cpu"))
    decision = ENGINE.evaluate(request(), smaller, environment(findings=findings), None, health, history(current_memory=now))
    assert (decision.applied_memory, decision.clamps) == (smaller.memory, ())


def test_memory_may_grow_when_there_is_no_pressure() -> None:
    now = MemoryPlan(micro_batch_rows=2)
    decision = ENGINE.evaluate(
        request(), plan(3), environment(), None, SegmentHealth(memory_used_fraction=0.5), history(current_memory=now)
    )
    assert decision.applied_memory == plan(3).memory


def canary(**changes: Any) -> PolicyHistory:
    values = {
        "current": Hyperparams(lr_multiplier=0.5), "canary_until_segment": 5, "canary_baseline_loss": 2.0,
        "before_change": Hyperparams(lr_multiplier=0.7), "cool_down_until_segment": 7,
    }  # fmt: skip
    return history(**{**values, **changes})


@pytest.mark.parametrize("advice", [None, ExecutiveDirective(lr_multiplier=0.5), Refusal(reason="late")])
def test_a_change_that_made_the_loss_worse_is_reverted(advice: ExecutiveDirective | Refusal | None) -> None:
    decision = ENGINE.evaluate(request(), plan(5), environment(), advice, SegmentHealth(loss_last=2.3), canary())
    assert (decision.allow, decision.reason, decision.applied_hyperparams.lr_multiplier) == (True, "canary_reverted", 0.7)
    assert "2.3" in decision.detail


@pytest.mark.parametrize("loss", [1.9, 2.0, 2.19])
def test_a_change_within_the_threshold_stays(loss: float) -> None:
    directive = ExecutiveDirective(lr_multiplier=0.5)
    decision = ENGINE.evaluate(request(), plan(5), environment(), directive, SegmentHealth(loss_mean=loss, loss_last=9.0), canary())
    assert (decision.reason, decision.applied_hyperparams.lr_multiplier) == ("accepted", 0.5)


@pytest.mark.parametrize(
    ("approval", "allow", "reason", "multiplier"),
    [
        ("not_asked", False, "approval_required", 1.0),
        ("refused", False, "approval_refused", 1.0),
        ("timed_out", False, "approval_timed_out", 1.0),
        ("granted", True, "accepted", 0.5),
    ],
)
def test_a_person_approves_changes(approval: Any, allow: bool, reason: str, multiplier: float) -> None:
    asked = request(policy={"approval": {"required": True}})
    decision = ENGINE.evaluate(asked, plan(), environment(), ExecutiveDirective(lr_multiplier=0.5), approval=approval)
    assert (decision.allow, decision.reason, decision.applied_hyperparams.lr_multiplier) == (allow, reason, multiplier)
    assert decision.proposed_hyperparams == (None if allow else Hyperparams(lr_multiplier=0.5))


def test_approval_is_not_asked_for_again_while_nothing_changes() -> None:
    asked = request(policy={"approval": {"required": True}})
    before = history(current=Hyperparams(lr_multiplier=0.5))
    assert ENGINE.evaluate(asked, plan(1), environment(), ExecutiveDirective(lr_multiplier=0.5), HEALTHY, before).allow
    assert ENGINE.evaluate(asked, plan(1), environment(), None, HEALTHY, before).applied_hyperparams == Hyperparams()


def test_plain_evaluate_needs_no_health_or_history() -> None:
    assert ENGINE.evaluate(request(), plan(), environment(), GREEDY) == ENGINE.evaluate(
        request(), plan(), environment(), GREEDY, HEALTHY, NO_HISTORY, "not_asked"
    )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_loss_scale_proposed_once_training_has_begun_is_recorded_as_not_taken(dtype: str) -> None:
    """An engine takes the first loss scale when it is built and adjusts it by itself from then on: nothing would notice another."""
    asked = request(training={"loss_scale_initial_power": 12})
    decision = ENGINE.evaluate(asked, plan(3), environment("cuda", dtype), GREEDY)
    assert decision.applied_hyperparams == Hyperparams(lr_multiplier=0.85, gradient_clip_norm=1.25, loss_scale_initial_power=12)
    (clamp,) = [clamp for clamp in decision.clamps if clamp.field == "loss_scale_initial_power"]
    assert (clamp.proposed, clamp.applied, clamp.reason) == (16.0, 12.0, "loss_scale_set")
    assert decision.not_applicable == ("loss_scale_initial_power",)
    assert "has no effect once training has begun" in explain_decision(decision)
    same = ENGINE.evaluate(asked, plan(3), environment("cuda", dtype), ExecutiveDirective(loss_scale_initial_power=12))
    assert (same.reason, same.clamps, same.not_applicable) == ("accepted", (), ("loss_scale_initial_power",))


def test_a_decision_that_an_older_version_recorded_comes_out_as_recorded() -> None:
    """Its records lack `loss_scale_once`: the replay of an old journal finds no difference."""
    inputs = ENGINE.inputs(request(), environment("cuda", "float16"), ExecutiveDirective(loss_scale_initial_power=8))
    old = PolicyInputs.model_validate(inputs.model_dump(exclude={"loss_scale_once"}))
    decision = decide(old, plan(3))
    assert (decision.reason, decision.applied_hyperparams.loss_scale_initial_power, decision.not_applicable) == ("accepted", 8, ())


def test_a_fresh_engine_is_built_with_the_request_s_own_loss_scale() -> None:
    """It was built with the default whatever the request said, and no later value reaches it."""
    asked = request(training={"loss_scale_initial_power": 16, "gradient_clip_norm": 0.5})
    config = engine_config(asked, "float16", FOUR_ROWS, fresh_position(asked).hyperparams, 100)
    assert (config["fp16"]["initial_scale_power"], config["gradient_clipping"]) == (16, 0.5)
