"""Synthetic memory of a device or a host, driven by the controller under test: not recorded on a device, only shaped like one.

`simulate` closes the loop: the peak of each step follows from the plan that the controller chose before it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from mem_core.core.memory.control import Decision, MemoryControl, Watermarks
from mem_core.core.memory.diagnosis import StepReading
from mem_core.core.memory.ladder import MicroBatch, PlanBounds, largest_micro_batch
from mem_core.core.memory.model import PeakLine
from mem_core.domain.plan import MemoryPlan

GIB = 2**30


@dataclass(frozen=True)
class World:
    """A made-up machine: bytes as functions of the step. `fragmented_bytes` is what a caching allocator holds beside the peak.

    An allocator never holds more than the limit: where peak and fragments together pass it, the allocation fails.
    """

    limit_bytes: Callable[[int], float]
    fixed_bytes: Callable[[int], float]
    per_token: float
    fragmented_bytes: Callable[[int], float] = lambda step: 0.0
    tokens: Callable[[int, int], int] = lambda step, most: most
    noise_bytes: float = 0.0


@dataclass
class Outcome:
    """What happened over a simulated run. An OOM is a peak above the limit; it is answered as the rank answers it."""

    readings: list[StepReading] = field(default_factory=list[StepReading])
    decisions: list[tuple[int, Decision]] = field(default_factory=list[tuple[int, Decision]])
    ooms: list[int] = field(default_factory=list[int])
    plans: list[MemoryPlan] = field(default_factory=list[MemoryPlan])

    def actions(self) -> list[str]:
        """The actions in order."""
        return [decision.action for _, decision in self.decisions]


def simulate(
    world: World, steps: int, *, first: MemoryPlan, bounds: PlanBounds, line: PeakLine | None = None, seed: int = 0, patience: int = 50
) -> Outcome:
    """Run the controller over `steps` steps of the world."""
    control = MemoryControl(Watermarks(0.9, 0.7), bounds, first, line, patience=patience)
    rng = random.Random(seed)
    outcome = Outcome()
    for step in range(steps):
        most = largest_micro_batch(control.plan, bounds).tokens
        tokens = min(most, world.tokens(step, most))
        micro_batch = MicroBatch(max(1, tokens // bounds.longest_tokens), min(tokens, bounds.longest_tokens))
        fixed, limit = world.fixed_bytes(step), world.limit_bytes(step)
        scale = 0.4 if control.plan.activation_checkpointing else 1.0
        peak = fixed + scale * world.per_token * micro_batch.tokens + rng.gauss(0, 1) * world.noise_bytes
        if peak + world.fragmented_bytes(step) > limit:
            outcome.ooms.append(step)
        reading = StepReading(
            batch_index=step,
            micro_batch=micro_batch,
            used_bytes=int(fixed),
            peak_bytes=int(peak),
            limit_bytes=int(limit),
            limit_name="device free",
            reserved_bytes=int(min(limit, peak + world.fragmented_bytes(step))),
        )
        outcome.readings.append(reading)
        outcome.plans.append(control.plan)
        decision = control.decide(reading)
        if decision is not None:
            outcome.decisions.append((step, decision))
            if decision.plan is not None:
                control.changed(decision.plan)
    return outcome
