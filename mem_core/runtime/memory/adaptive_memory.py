"""Adaptive memory inside a rank: the plan that each batch is split by, and what follows when a pass did not fit.

Decisions are those of the pure core (`memory_control`, `memory_ladder`, `memory_start`); here they meet readings, the journal and
the other ranks. A step far from every limit costs one comparison.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from mem_core.core.memory.control import Decision, MemoryControl, Watermarks
from mem_core.core.memory.diagnosis import StepReading, failed_in_pieces
from mem_core.core.memory.growth import Growth
from mem_core.core.memory.ladder import MicroBatch, PlanBounds, held_before, shrink_plan
from mem_core.core.memory.model import PeakLine
from mem_core.core.memory.start import Limit
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.events import MemoryPlanChanged, Noted, OomAbsorbed
from mem_core.domain.plan import MemoryPlan, MemoryPlanChange, plan_at, record_change
from mem_core.domain.segment import OutOfMemory, SegmentFailure
from mem_core.runtime.memory.reader import MemoryReader
from mem_core.runtime.ranks.agreement import Agreement, RankReading
from mem_core.runtime.ranks.place import RankPlace
from mem_core.runtime.ranks.worker.device import LocalDevice
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

RecordEvents = Callable[[tuple[MemoryPlanChanged | OomAbsorbed | Noted, ...]], None]
UNREDUCED_STAGES = (0, 1)  # here backward only accumulates, so gradients may be thrown away and computed again to the bit (I5)
NEAR_SHARE = 0.8  # of the low watermark: from there on every step is read, and while a plan is shrunk
FAR_STEPS = 16
FRAGMENTED_SHARE = 0.2


class AdaptiveMemory:
    """One rank's part. Rank 0 decides and records; the others compute or read the same plan.

    `record` returns when the events are durable in the journal: no forward runs under a plan that is not.
    """

    def __init__(
        self, spec: WorkerSpec, place: RankPlace, device: LocalDevice, agreement: Agreement, bounds: PlanBounds, record: RecordEvents
    ) -> None:
        self._spec, self._rank, self._device = spec, place.rank, device
        self._agreement, self.bounds, self._record = agreement, bounds, record
        section = spec.request.memory
        self.adaptive = section.mode == "adaptive"
        self.retries_in_step = self.adaptive and spec.request.parallel.zero_stage in UNREDUCED_STAGES
        self.reader: MemoryReader = device.memory_reader(section.budget if isinstance(section.budget, int) else None)
        self._marks = Watermarks(section.high_watermark, section.low_watermark)
        self._control: MemoryControl | None = None
        self._replay_until = 0
        self._steps_to_reading = 0
        self._largest: MicroBatch | None = None
        self._last = RankReading(0, 0, 0)
        self._shared: list[RankReading] = []
        self._limit = Limit("", 0, 0, 0)
        self._pending: Decision | None = None
        self._may_decide_from = 0
        self._growth = Growth()
        self._steps = 0
        self.replace_reason = ""

    # -- before training ------------------------------------------------------------------------------------------------

    def limits_now(self) -> list[Limit]:
        """Every limit against what all ranks use."""
        self._last = self.reader.read()
        return self._limits()

    def begin(self, position: TrainingPosition, replay_until: int, line: PeakLine | None) -> None:
        """The engine is built and stands at `position`; batches below `replay_until` follow what is recorded for them."""
        self._replay_until = max(replay_until, *(change.batch_index for change in position.memory_plan_changes), 0)
        self._control = MemoryControl(self._marks, self.bounds, self._spec.default_plan, line)
        self._control.changed(self.plan(position))
        for change in position.memory_plan_changes:
            if change.failed_tokens:
                self._control.changed(self.plan(position), failed_tokens=change.failed_tokens, limit_bytes=change.limit_bytes)

    def may_choose(self, position: TrainingPosition) -> bool:
        """Whether the plan of the next batch is free: adaptation is on and the batch was not done before."""
        return self.adaptive and position.batch_index >= self._replay_until

    def choose(self, position: TrainingPosition, plan: MemoryPlan, reason: str, limit: Limit) -> TrainingPosition:
        """Follow `plan` from the next batch on, all ranks alike; rank 0 records it first. Only before training."""
        change = MemoryPlanChange(batch_index=position.batch_index, plan=plan, reason=reason)
        if self._rank == 0:
            self._record((MemoryPlanChanged(change=change, observed_bytes=limit.used_bytes, limit_bytes=limit.limit_bytes),))
        if self._control is not None:
            self._control.changed(plan)
        return with_change(position, change)

    def note(self, text: str) -> None:
        """A line for the journal, from rank 0."""
        if self._rank == 0:
            self._record((Noted(text=text),))

    # -- around a step --------------------------------------------------------------------------------------------------

    def plan(self, position: TrainingPosition) -> MemoryPlan:
        """The recorded plan of the next batch."""
        return plan_at(position.memory_plan_changes, position.batch_index, self._spec.default_plan)

    def follow(self, position: TrainingPosition) -> TrainingPosition:
        """Before a step: take over what rank 0 has decided. The decision is in the journal before anybody acts on it."""
        if self._rank != 0:
            return self._follow_announced(position)
        if self._control is not None and (plan := self.plan(position)) != self._control.plan:
            self._control.changed(plan)  # a recorded change of a redone step
        decision, self._pending = self._pending, None
        if decision is None or decision.plan is None:
            return position
        first = position.batch_index + self._agreement.notice_steps
        change = MemoryPlanChange(batch_index=first, plan=decision.plan, reason=f"{decision.action}: {decision.reason}")
        self._record((MemoryPlanChanged(change=change, observed_bytes=decision.observed_bytes, limit_bytes=decision.limit_bytes),))
        self._agreement.announce(first, decision.plan)
        self._may_decide_from = first + 1
        assert self._control is not None
        self._control.changed(decision.plan)
        self.forget_peak()  # what passes of the old size left free is not a peak of the new one
        return with_change(position, change)

    def _follow_announced(self, position: TrainingPosition) -> TrainingPosition:
        announced = self._agreement.announced(position.batch_index)
        if announced is None or announced[1] == self.plan(position):
            return position
        self.forget_peak()
        return with_change(position, MemoryPlanChange(batch_index=announced[0], plan=announced[1], reason="as rank 0 recorded"))

    def observe(self, batch_index: int, micro_batch: MicroBatch) -> RankReading:
        """After a step: read memory where it is due, and let rank 0 decide about the next one."""
        self._steps += 1
        most = self._spec.most_steps
        if most is not None and self._steps >= most and not self.replace_reason:
            self.replace_reason = f"{self._steps} steps done: the process before it grew until it was ended, a leak"
        if self._largest is None or micro_batch.tokens > self._largest.tokens:
            self._largest = micro_batch
        self._steps_to_reading -= 1
        if self._steps_to_reading > 0:
            return self._last
        largest, self._largest = self._largest, None
        self._last = replace(self.reader.read(), rows=largest.rows, length=largest.length)
        self._limit = max(self._limits(), key=lambda limit: limit.pressure)
        watchful = self._limit.pressure >= NEAR_SHARE * self._marks.low or (self._control is not None and self._control.shrunk)
        self._steps_to_reading = 1 if watchful else FAR_STEPS
        if self._rank == 0:
            self._decide(batch_index, max((rank.micro_batch for rank in self._shared), key=lambda each: each.tokens))
        return self._last

    @property
    def peak_and_limit(self) -> tuple[int, int]:
        """(peak, limit) in bytes of the tightest limit at the last reading: evidence for a failure."""
        return self._limit.peak_bytes, self._limit.limit_bytes

    def room_for_a_writer(self) -> int:
        """Bytes of resident memory that one more process of this rank may take. Address space is each process's own."""
        limits = [limit for limit in self._limits() if not limit.of_address_space]
        return min(((limit.limit_bytes - limit.used_bytes) // limit.shares for limit in limits), default=2**62)

    def _limits(self) -> list[Limit]:
        self._shared = self._agreement.share(self._last)
        return self.reader.limits(self._shared)

    def _decide(self, batch_index: int, largest: MicroBatch) -> None:
        limit = self._limit
        if self._control is not None:
            self._control.worked(largest.tokens, limit.name, limit.used_bytes)
        if self._control is None or not self.adaptive or batch_index + 1 < max(self._replay_until, self._may_decide_from):
            return
        decision = self._control.decide(
            StepReading(
                batch_index=batch_index,
                micro_batch=largest,
                used_bytes=limit.used_bytes,
                peak_bytes=limit.peak_bytes,
                limit_bytes=limit.limit_bytes,
                limit_name=limit.name,
                reserved_bytes=self._last.mapped_bytes if self._device.kind == "cuda" else 0,
            )
        )
        if decision is None:
            return
        if decision.plan is not None:
            self._pending = decision
            return
        self.note(f"memory: {decision.reason}; {self._device.memory_summary()}")
        if decision.action == "replace":
            self.replace_reason = decision.reason

    def forget_peak(self) -> None:
        """After work that is not that of the plan which follows: its peak says nothing about that, and what it left free goes back."""
        self._device.release_free_memory()
        self.reader.read()

    def at_boundary(self) -> None:
        """Between segments: give back what the allocator holds without need. Local, the same result on every rank."""
        self._growth = self._growth.add(self._device.probe().usage().used_bytes)
        if found := self._growth.found():
            self._growth = self._growth.said()
            self.note(f"memory: {found}; {self._device.memory_summary()}")
        idle = self._last.mapped_bytes - self._last.used_bytes
        if self._device.kind == "cuda" and self._limit.limit_bytes and idle > FRAGMENTED_SHARE * self._limit.limit_bytes:
            self._device.release_free_memory()

    # -- a pass that did not fit ----------------------------------------------------------------------------------------

    def with_evidence(self, failure: SegmentFailure) -> SegmentFailure:
        """The failure with the limit that binds, what worked before, and what a device's allocator holds, where its own words did not
        say it. Before anything is released."""
        if not isinstance(failure, OutOfMemory) or failure.evidence.limit_name:
            return failure
        self._last = now = self.reader.read()
        limit = max(self._limits(), key=lambda limit: limit.pressure, default=self._limit)
        seen = failure.evidence
        found: dict[str, object] = {"limit_name": limit.name, "peak_bytes": seen.peak_bytes or limit.peak_bytes}
        if failure.memory == "device" and not seen.reserved_bytes:
            found |= {"used_bytes": now.used_bytes, "reserved_bytes": now.mapped_bytes}
        found["limit_bytes"] = seen.limit_bytes or limit.limit_bytes or None
        if self._control is not None:
            tokens = (seen.failed_rows or 0) * (seen.failed_length or 0)
            found["process_steps"] = self._steps
            found["worked_tokens"] = self._control.worked_tokens or None
            found["grown"] = self._control.grown(tokens, limit.name, limit.used_bytes, limit.limit_bytes)
        return failure.model_copy(update={"evidence": seen.model_copy(update=found)})

    def absorbable(self, failure: SegmentFailure) -> OutOfMemory | None:
        """The failure where a smaller pass in this process is its cure. Memory in pieces is not: a process with another setting of the
        allocator is tried first."""
        failure = self.with_evidence(failure)
        in_pieces = not self._spec.allocator_setting and failed_in_pieces(failure)
        return failure if isinstance(failure, OutOfMemory) and not in_pieces else None

    def agree(self, failed: MicroBatch | None) -> MicroBatch | None:
        """The largest forward pass that did not fit on any rank in this try, None if all went well."""
        return self._agreement.agree(failed, undoable=self.retries_in_step)

    def absorb(
        self, position: TrainingPosition, failed: MicroBatch, memory: Literal["host", "device"], phase: str, text: str
    ) -> TrainingPosition | None:
        """Record a smaller plan from this batch on; None when no rung that can be taken here is left.

        Called on every rank after `agree` found a failure; all compute the same plan, rank 0 records it before anybody goes on.
        """
        held = held_before(position.memory_plan_changes, position.batch_index)
        plan = shrink_plan(self.plan(position), self.bounds, failed, held)
        if plan is None:
            return None
        self._pending = None
        peak_bytes, limit_bytes = self.peak_and_limit
        limits = self.limits_now()
        grown = self._control is not None and any(
            self._control.grown(failed.tokens, each.name, each.used_bytes, each.limit_bytes) for each in limits
        )
        if grown and self._rank == 0:
            self.replace_reason = f"a pass of {failed.tokens} tokens worked before in this process and failed: memory has grown, a leak"
        change = MemoryPlanChange(
            batch_index=position.batch_index,
            plan=plan,
            reason=f"out of {memory} memory in {phase} at {failed.rows} x {failed.length} tokens{', which worked before' if grown else ''}",
            failed_tokens=0 if grown else failed.tokens,
            limit_bytes=limit_bytes,
        )
        absorbed = OomAbsorbed(batch_index=position.batch_index, memory=memory, phase=phase, detail=text[:500])
        changed = MemoryPlanChanged(change=change, observed_bytes=peak_bytes, limit_bytes=limit_bytes)
        self._agreement.record_first(lambda: self._record((changed, absorbed)))
        if self._control is not None:
            self._control.changed(plan, failed_tokens=change.failed_tokens, limit_bytes=limit_bytes)
        return with_change(position, change)


def with_change(position: TrainingPosition, change: MemoryPlanChange) -> TrainingPosition:
    """The position with one more recorded change."""
    return position.model_copy(update={"memory_plan_changes": record_change(position.memory_plan_changes, change)})
