"""The supervisor's side of adaptive memory: the recorded plan changes of a run, and the next rung after a failed segment."""

from dataclasses import replace
from pathlib import Path

from mem_core.core.doctor.changes import offload
from mem_core.core.memory.diagnosis import failed_in_pieces
from mem_core.core.memory.fit import exhausted_remedy, leak_remedy
from mem_core.core.memory.ladder import MicroBatch, PlanBounds, held_before, largest_micro_batch, merge_changes, shrink_plan
from mem_core.core.run.fold import fold_state
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.environment import MemoryBudget
from mem_core.domain.errors import MemoryExhausted
from mem_core.domain.events import DoctorReported, MemoryPlanChanged, Noted, OomAbsorbed, SegmentEnded
from mem_core.domain.plan import MemoryPlan, MemoryPlanChange, plan_at, record_change
from mem_core.domain.segment import OutOfMemory, SegmentFailure, describe_failure
from mem_core.domain.units import format_bytes
from mem_core.infrastructure.telemetry.progress import Progress
from mem_core.runtime.data.serving.dataset import TokenDataset
from mem_core.runtime.data.serving.splits import padded_length
from mem_core.runtime.ranks.worker.protocol import WorkerSpec

ALLOCATOR_SETTING = "expandable_segments:True"  # torch's own cure for memory in pieces
# A failure to load, save or evaluate is not cured by smaller training micro-batches.
_TRAINING_PHASES = ("calibrate", "first_step", "forward", "backward", "step", None)


class MemoryService:
    """One for a run. `changes` is the recorded step function of plans; what a restored engine must follow."""

    def __init__(self, spec: WorkerSpec, state: StateManager, progress: Progress) -> None:
        self._spec = spec
        self._state = state
        self._progress = progress
        lines = state.lines()
        self.changes = fold_state(lines).memory_plan_changes
        reports = [line.event.report for line in lines if isinstance(line.event, DoctorReported)]
        self._budgets: tuple[MemoryBudget, ...] = reports[-1].memory if reports else ()
        self._model = reports[-1].model if reports else None
        self._bounds: PlanBounds | None = None
        self._most_steps: int | None = None
        ended = [line.event.outcome for line in lines if isinstance(line.event, SegmentEnded)]
        self._in_pieces = any(isinstance(outcome, OutOfMemory) and failed_in_pieces(outcome) for outcome in ended)

    @property
    def bounds(self) -> PlanBounds:
        """What the ladder may do, an engine built anew included."""
        if self._bounds is None:
            request = self._spec.request
            share = request.training.global_batch_size // self._spec.num_ranks
            asked = request.memory.micro_batch_size
            with TokenDataset.open(Path(self._spec.data_folder)) as data:
                longest = int(data.lengths.max())
            self._bounds = PlanBounds(
                most_rows=share if asked == "auto" else min(share, asked),
                longest_tokens=padded_length(longest, request.data.sequence_length),
                may_checkpoint=request.model.activation_checkpointing != "off",
                may_offload=bool(offload(request, self._model, self._spec.device)),
            )
        return self._bounds

    def restored(self, position: TrainingPosition) -> TrainingPosition:
        """The position with every change that the journal knows: a redone step is split as recorded."""
        return position.model_copy(update={"memory_plan_changes": merge_changes(position.memory_plan_changes, self.changes)})

    def record(self, events: tuple[MemoryPlanChanged | OomAbsorbed | Noted, ...]) -> None:
        """Journal what rank 0 reports, durably, before it goes on."""
        for event in events:
            self._state.emit(event)
            if isinstance(event, MemoryPlanChanged):
                self.changes = record_change(self.changes, event.change)
                self._progress.note(f"memory: {_words(event.change)}")

    def can_shrink_after(self, failure: SegmentFailure) -> bool:
        """Whether a smaller plan may cure this failure and there is one, or processes that are replaced sooner."""
        return self._shorter_life(failure) is not None or self._next_plan(failure) is not None

    def shrink_after(self, failure: SegmentFailure) -> bool:
        """Record a smaller plan for the batch that failed; False where none is left or size was not the cause.

        What grew is replaced sooner from now on: half-way to where it met its limit, so that what it did until then is saved.
        """
        shorter = self._shorter_life(failure)
        if shorter is not None:
            self._most_steps = shorter
            steps = failure.evidence.process_steps
            self._note(f"a process grew until it was ended after {steps} steps, a leak: workers are replaced after {shorter} from now on")
            return False
        plan = self._next_plan(failure)
        if plan is None:
            return False
        evidence = failure.evidence
        change = MemoryPlanChange(
            batch_index=evidence.batch_index or 0,
            plan=plan,
            reason=describe_failure(failure)[:300],
            failed_tokens=self._failed(failure).tokens,
            limit_bytes=evidence.limit_bytes or 0,
        )
        self.record((MemoryPlanChanged(change=change, observed_bytes=evidence.peak_bytes or 0, limit_bytes=evidence.limit_bytes or 0),))
        return True

    def can_defragment_after(self, failure: SegmentFailure) -> bool:
        """Whether the failed allocation was one of fragmentation and the allocator's setting for it has not been tried yet."""
        return not self._in_pieces and failed_in_pieces(failure)

    def defragment_after(self, failure: SegmentFailure) -> None:
        """New workers get an allocator that maps memory in pieces; the plan stays as it is."""
        self._in_pieces = True
        seen = failure.evidence
        self._note(
            f"the device's memory was in pieces, not too little: {format_bytes((seen.reserved_bytes or 0) - (seen.used_bytes or 0))} of "
            f"{format_bytes(seen.limit_bytes or 0)} were reserved and unused; fresh workers go on with {ALLOCATOR_SETTING} and the same "
            "micro-batch"
        )

    def configured(self, spec: WorkerSpec) -> WorkerSpec:
        """What new workers are made from."""
        return replace(
            spec, allocator_setting=ALLOCATOR_SETTING if self._in_pieces else spec.allocator_setting, most_steps=self._most_steps
        )

    def _note(self, text: str) -> None:
        self._state.emit(Noted(text=f"memory: {text}"))
        self._progress.note(f"memory: {text}")

    def exhausted(self, failure: SegmentFailure, error: MemoryExhausted) -> MemoryExhausted:
        """The same error with the ways out and their numbers as its remedy.

        The model's sizes are those that the doctor read: a remote model may be out of reach by now.
        """
        evidence = failure.evidence
        if evidence.grown:
            return MemoryExhausted(error.problem, remedy=leak_remedy(evidence))
        if self._model is None:
            return error
        memory = {budget.kind: budget.budget_bytes for budget in self._budgets}
        limit = evidence.limit_bytes or memory.get("device" if self._spec.device == "cuda" else "host", 0)
        remedy = exhausted_remedy(self._model, self._spec.request, self._spec.dtype, self._spec.device, limit, evidence.limit_name)
        return MemoryExhausted(error.problem, remedy=remedy)

    def _next_plan(self, failure: SegmentFailure) -> MemoryPlan | None:
        adaptive = self._spec.request.memory.mode == "adaptive"
        if not adaptive or not isinstance(failure, OutOfMemory) or failure.evidence.phase not in _TRAINING_PHASES:
            return None
        if self._shorter_life(failure) is not None:
            return None  # a fresh process is the cure, not a smaller pass
        held = held_before(self.changes, failure.evidence.batch_index or 0)
        return shrink_plan(self._plan(failure), self.bounds, self._failed(failure), held)

    def _shorter_life(self, failure: SegmentFailure) -> int | None:
        """After how many steps workers are to be replaced, where they were ended by their growth; None where no fewer are left."""
        seen = failure.evidence
        adaptive = self._spec.request.memory.mode == "adaptive"
        if not adaptive or not isinstance(failure, OutOfMemory) or not seen.grown or not seen.process_steps:
            return None
        half = min(seen.process_steps, self._most_steps or seen.process_steps) // 2
        return half if half >= 1 else None

    def _plan(self, failure: SegmentFailure) -> MemoryPlan:
        return plan_at(self.changes, failure.evidence.batch_index or 0, self._spec.default_plan)

    def _failed(self, failure: SegmentFailure) -> MicroBatch:
        evidence = failure.evidence
        if evidence.failed_rows and evidence.failed_length:
            return MicroBatch(evidence.failed_rows, evidence.failed_length)
        return largest_micro_batch(self._plan(failure), self.bounds)


def _words(change: MemoryPlanChange) -> str:
    plan = change.plan
    parts = [
        f"at most {plan.micro_batch_tokens} tokens" if plan.micro_batch_tokens else "",
        f"at most {plan.micro_batch_rows} rows" if plan.micro_batch_rows else "",
        "activation checkpointing" if plan.activation_checkpointing else "",
        "optimizer on the host" if plan.offload_optimizer == "cpu" else "",
    ]
    return f"from batch {change.batch_index} on {', '.join(part for part in parts if part)} per forward pass ({change.reason})"
