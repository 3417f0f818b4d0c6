"""The zero-trust gate: the only way by which a value reaches the training engine (I7)."""

from typing import Any

from mem_core.core.policy.rules import FIELDS, decide, directive_problem
from mem_core.domain.directive import ExecutiveDirective, Refusal
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import PolicyDecided
from mem_core.domain.plan import CandidatePlan, Hyperparams
from mem_core.domain.policy import (
    BUILT_IN_BOUNDS,
    HEALTHY,
    NO_HISTORY,
    Approval,
    PolicyBounds,
    PolicyDecision,
    PolicyHistory,
    PolicyInputs,
    SegmentHealth,
)
from mem_core.domain.request import RuntimeRequest

Advice = ExecutiveDirective | Refusal | None


class LocalPolicyEngine:
    """Decides deterministically what a segment runs with.

    `evaluate` is pure and total: for every input it returns a decision, the same one for the same input, and no applied
    value lies outside both the lane's bounds and {the request's own value, the current value}.
    """

    def __init__(self, bounds: PolicyBounds = BUILT_IN_BOUNDS) -> None:
        self.bounds = bounds

    def evaluate(
        self,
        request: RuntimeRequest,
        plan: CandidatePlan,
        environment: EnvironmentReport,
        directive: Advice = None,
        health: SegmentHealth = HEALTHY,
        history: PolicyHistory = NO_HISTORY,
        approval: Approval = "not_asked",
    ) -> PolicyDecision:
        """Judge the advice for the segment of `plan`. `plan.hyperparams` is not read: the base is the request's own."""
        return decide(self.inputs(request, environment, directive, health, history, approval), plan)

    def inputs(
        self,
        request: RuntimeRequest,
        environment: EnvironmentReport,
        directive: Advice = None,
        health: SegmentHealth = HEALTHY,
        history: PolicyHistory = NO_HISTORY,
        approval: Approval = "not_asked",
    ) -> PolicyInputs:
        """The extract of request and environment on which the decision depends; secret-free by construction."""
        sound = _sound(directive)
        return PolicyInputs(
            device_asked=request.device,
            device=environment.device,
            dtype=environment.dtype,
            base=request_values(request),
            high_watermark=request.memory.high_watermark,
            memory_warnings=memory_warnings(environment),
            approval_required=request.policy.approval.required,
            approval=approval,
            directive=sound if isinstance(sound, ExecutiveDirective) else None,
            refusal=sound if isinstance(sound, Refusal) else None,
            health=health,
            history=history,
            bounds=self.bounds,
            loss_scale_once=True,
        )


def _sound(advice: Advice) -> Advice:
    """The directive as its own validation would have made it, so that a recorded one reads back equal; else a refusal."""
    if not isinstance(advice, ExecutiveDirective):
        return advice
    return directive_problem(advice) or ExecutiveDirective.model_validate({name: getattr(advice, name, None) for name in FIELDS})


def request_values(request: RuntimeRequest) -> Hyperparams:
    """The request's own values: what holds without advice."""
    training = request.training
    return Hyperparams(
        lr_multiplier=1.0,
        gradient_clip_norm=training.gradient_clip_norm,
        loss_scale_initial_power=training.loss_scale_initial_power,
    )


def memory_warnings(environment: EnvironmentReport) -> tuple[str, ...]:
    """Names of the doctor's memory checks that were not well."""
    return tuple(
        finding.check
        for finding in environment.findings
        if finding.check.split(".")[0] == "memory" and finding.severity in ("warning", "failure")
    )


def decision_inputs(
    engine: LocalPolicyEngine,
    request: RuntimeRequest,
    environment: EnvironmentReport,
    directive: Advice = None,
    health: SegmentHealth = HEALTHY,
    history: PolicyHistory = NO_HISTORY,
    approval: Approval = "not_asked",
) -> dict[str, Any]:
    """`PolicyDecided.inputs`: plain JSON from which `recompute` gives the same decision."""
    return engine.inputs(request, environment, directive, health, history, approval).model_dump(mode="json")


def recompute(event: PolicyDecided) -> PolicyDecision:
    """The decision that follows from what was recorded.

    Raises:
        pydantic.ValidationError: the recorded inputs are not complete.
    """
    return decide(PolicyInputs.model_validate(event.inputs), event.plan)
