"""The way down when memory does not suffice: pure decisions on `MemoryPlan`, one rung at a time, each rung strictly smaller.

micro-batch (half of what failed, down to one row) -> activation checkpointing -> optimizer offload -> nothing left.
No rung changes which samples form a batch (I1); each changes speed, and the result only by rounding.
"""

from dataclasses import dataclass

from mem_core.domain.plan import MemoryPlan, MemoryPlanChange, record_change

NO_BOUND = 2**62
SMALLEST_TOKENS = 16  # the smallest padded length: a bound below it changes no split


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """What the ladder may do in one run.

    `most_rows` is the largest number of rows in one forward pass (a rank's share, or what the user fixed), `longest_tokens` the
    padded length of the longest row there is.
    """

    most_rows: int
    longest_tokens: int
    may_checkpoint: bool = True
    may_offload: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Size of one forward pass: rows, each padded to `length` tokens."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Padded tokens."""
        return self.rows * self.length


def largest_micro_batch(plan: MemoryPlan, bounds: PlanBounds) -> MicroBatch:
    """The largest forward pass that `plan` can lead to."""
    rows = min(bounds.most_rows, plan.micro_batch_rows or bounds.most_rows)
    if plan.micro_batch_tokens:
        rows = min(rows, max(1, plan.micro_batch_tokens // bounds.longest_tokens))
    return MicroBatch(rows, bounds.longest_tokens)


def leads_to(plan: MemoryPlan, bounds: PlanBounds, seen: MicroBatch) -> bool:
    """Whether a plan allows such a pass. One that it does not is of an older plan: ranks that are told of a plan do a step first."""
    return seen.tokens <= max(plan.micro_batch_tokens, largest_micro_batch(plan, bounds).tokens)


def held_before(changes: tuple[MemoryPlanChange, ...], batch_index: int) -> MemoryPlan | None:
    """The plan that was in force before the one of `batch_index` where that one is larger: it had held for as long as growth waits.

    From recorded changes alone, so that every rank and the supervisor come to the same.
    """
    past = [change.plan for change in changes if change.batch_index <= batch_index]
    if len(past) < 2:
        return None
    before, now = past[-2:]
    larger = 0 < before.micro_batch_tokens < (now.micro_batch_tokens or NO_BOUND) or (
        before.activation_checkpointing and not now.activation_checkpointing
    )
    return before if larger else None


def shrink_plan(
    plan: MemoryPlan, bounds: PlanBounds, failed: MicroBatch | None = None, held: MemoryPlan | None = None
) -> MemoryPlan | None:
    """The next rung below `plan`; None when there is none.

    `failed` is the forward pass that did not fit where it is known: half its tokens are tried next. A pass of one row cannot be
    halved, so the ladder goes on to activation checkpointing at once. `held` is a smaller plan that has worked (`held_before`): a
    growth that failed goes back to it, since what is between the two is searched and not given away.
    """
    if held is not None and largest_micro_batch(held, bounds).tokens <= (failed or largest_micro_batch(plan, bounds)).tokens:
        return held
    smaller = _smaller_micro_batch(plan, bounds, failed or largest_micro_batch(plan, bounds))
    if smaller is not None:
        return smaller
    if bounds.may_checkpoint and not plan.activation_checkpointing:
        return plan.model_copy(update={"activation_checkpointing": True})
    if bounds.may_offload and plan.offload_optimizer == "none":
        return plan.model_copy(update={"offload_optimizer": "cpu"})
    return None


def _smaller_micro_batch(plan: MemoryPlan, bounds: PlanBounds, failed: MicroBatch) -> MemoryPlan | None:
    if failed.rows <= 1:
        return None
    tokens = max(SMALLEST_TOKENS, failed.tokens // 2)
    if plan.micro_batch_tokens:
        tokens = min(tokens, plan.micro_batch_tokens)
    smaller = plan.model_copy(update={"micro_batch_tokens": tokens})
    if plan.micro_batch_tokens != tokens:
        return smaller
    return None


def can_shrink(plan: MemoryPlan, bounds: PlanBounds) -> bool:
    """Whether any rung is left below `plan`."""
    return shrink_plan(plan, bounds) is not None


def merge_changes(saved: tuple[MemoryPlanChange, ...], journaled: tuple[MemoryPlanChange, ...]) -> tuple[MemoryPlanChange, ...]:
    """The recorded plan changes after a restore: those of the checkpoint, then what the journal has learnt since.

    A change that was recorded later wins for its own batch and all that follow, also when the checkpoint is older than it.
    """
    merged = saved
    for change in journaled:
        if change not in merged:
            merged = record_change(merged, change)
    return merged
