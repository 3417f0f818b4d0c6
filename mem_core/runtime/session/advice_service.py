"""Between segments: ask the planner, pass its answer through the policy engine, record the decision, replay recorded ones."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mem_core.core.policy.directive_parser import read_advice, reply_text
from mem_core.core.policy.history import history_for, recorded_decision
from mem_core.core.policy.local_policy_engine import LocalPolicyEngine, decision_inputs, request_values
from mem_core.core.policy.telemetry import health_for, summary_for
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.directive import Refusal
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import Event, JournalLine, PolicyDecided, SegmentEnded
from mem_core.domain.plan import CandidatePlan, MemoryPlan
from mem_core.domain.policy import Approval, PolicyDecision
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.planner.background import BackgroundAdvice
from mem_core.infrastructure.telemetry.metrics import read_segment_metrics

LOWERED = 0.5
AskPerson = Callable[[PolicyDecision], Approval]


@dataclass
class AdviceService:
    """Decides what each segment runs with. The planner only proposes; its silence is the deterministic default (I7)."""

    request: RuntimeRequest
    environment: EnvironmentReport
    state: StateManager
    engine: LocalPolicyEngine
    memory_plan: MemoryPlan
    planner: BackgroundAdvice | None
    metrics_folder: Path
    ask_person: AskPerson | None = None
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        for line in self.state.lines():
            self._remember(line)
        self.state.listeners.append(self._remember)

    @property
    def has_planner(self) -> bool:
        """Whether anybody proposes anything."""
        return self.planner is not None

    def _remember(self, line: JournalLine) -> None:
        """Only decisions count, and with a planner the outcomes that it is told about: memory stays small over a long run."""
        if isinstance(line.event, PolicyDecided) or (self.has_planner and isinstance(line.event, SegmentEnded)):
            self._events.append(line.event)

    def decide(self, segment_index: int, from_step: int, until_step: int) -> PolicyDecision:
        """The decision for a segment: the recorded one if there is one, else a new one that is recorded before it is used.

        Without a planner nothing changes of its own accord: the first decision of the run stands for every segment that has none.
        """
        recorded = recorded_decision(self._events, segment_index)
        if recorded is None and not self.has_planner:
            recorded = next((event.decision for event in self._events if isinstance(event, PolicyDecided)), None)
        if recorded is not None:
            return recorded
        reply = self._advice(segment_index)
        return self._record(segment_index if self.has_planner else 0, from_step, until_step, reply)

    def lower_learning_rate(self, segment_index: int, from_step: int, until_step: int) -> PolicyDecision:
        """After numbers that were not finite: half of what the segment had, through the engine's clamps, recorded for it alone."""
        present = self.decide(segment_index, from_step, until_step).applied_hyperparams.lr_multiplier
        return self._record(segment_index, from_step, until_step, json.dumps({"lr_multiplier": present * LOWERED}).encode())

    def _advice(self, segment_index: int) -> bytes | Refusal | None:
        section = self.request.policy.planner
        if self.planner is None or segment_index == 0 or segment_index % section.every_segments:
            return None
        lane = self.engine.bounds.of(self.environment.device)
        self.planner.ask(summary_for(self._events, segment_index, self.request, lane, gradient_norms=self._gradient_norms(segment_index)))
        return self.planner.collect(section.time_limit_s)

    def _gradient_norms(self, segment_index: int) -> tuple[float | None, ...]:
        """Mean gradient norm of each earlier segment, from the committed metrics."""
        return tuple(self._mean("grad_norm", event) for event in self._completed(segment_index))

    def _completed(self, segment_index: int) -> list[int]:
        found: dict[int, int] = {}
        for event in self._events:
            if isinstance(event, SegmentEnded) and event.outcome.kind == "completed" and event.segment_index < segment_index:
                found[event.segment_index] = event.outcome.to_step
        return [found[index] for index in sorted(found)]

    def _mean(self, column: str, to_step: int) -> float | None:
        try:
            columns = read_segment_metrics(self.metrics_folder / f"step-{to_step:09d}.npz")
            value = float(np.mean(columns[column].astype(np.float64)))
        except (OSError, ValueError):
            return None
        return value if np.isfinite(value) else None

    def _record(self, segment_index: int, from_step: int, until_step: int, reply: bytes | Refusal | None) -> PolicyDecision:
        lane = self.engine.bounds.of(self.environment.device)
        plan = CandidatePlan(
            segment_index=segment_index,
            from_step=from_step,
            until_step=until_step,
            hyperparams=request_values(self.request),
            memory=self.memory_plan,
        )
        advice = read_advice(reply)
        steps = self._completed(segment_index)
        health = health_for(self._events, segment_index, lane, loss_mean=self._mean("loss", steps[-1]) if steps else None)
        history = history_for(self._events, segment_index)
        decision = self.engine.evaluate(self.request, plan, self.environment, advice, health, history)
        approval: Approval = "not_asked"
        if decision.reason == "approval_required" and self.ask_person is not None:
            approval = self.ask_person(decision)
            decision = self.engine.evaluate(self.request, plan, self.environment, advice, health, history, approval)
        self.state.emit(
            PolicyDecided(
                segment_index=segment_index,
                plan=plan,
                directive_text=reply_text(reply),
                inputs=decision_inputs(self.engine, self.request, self.environment, advice, health, history, approval),
                decision=decision,
            )
        )
        return decision
