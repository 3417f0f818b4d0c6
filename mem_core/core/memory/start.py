"""The first plan of a run, from measured passes and the room there is. Pure."""

from dataclasses import dataclass

from mem_core.core.memory.ladder import SMALLEST_TOKENS, PlanBounds, largest_micro_batch
from mem_core.core.memory.model import PeakLine
from mem_core.domain.plan import MemoryPlan

MARGIN = 0.02  # of the limit, kept free for what no short measurement shows
ADDRESS_SPACE = ("RLIMIT_AS", "RLIMIT_DATA")
COULD_BIND = 0.5  # below this predicted part of a limit nothing is measured: it cannot bind


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of one rank beside activations, by the doctor's formula: `to_come` is not allocated yet (optimizer moments),
    `gradients` stay between micro-batches, `step` is the update's own transient; `retained` is the part of freed activations that
    still counts during the update."""

    to_come: int
    gradients: int
    step: int
    retained: float


def moments_to_come(optimizer_bytes: int, *, stage: int, dtype: str, applied_steps: int, offloaded: bool) -> int:
    """What the first update will allocate for good, out of the doctor's `optimizer` bytes of one rank.

    Adam's two moments are made at the first update at every stage; a float32 master copy is there with the engine, and moments that
    were read from a checkpoint are there as well. What is offloaded never comes to the device.
    """
    if applied_steps > 0 or offloaded:
        return 0
    has_master = stage >= 1 or dtype != "float32"
    return optimizer_bytes * 2 // 3 if has_master else optimizer_bytes


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit against what is used under it. `shares` processes take from it together."""

    name: str
    used_bytes: int
    peak_bytes: int
    limit_bytes: int
    shares: int = 1

    @property
    def pressure(self) -> float:
        """Peak as a part of the limit."""
        return self.peak_bytes / self.limit_bytes if self.limit_bytes > 0 else 0.0

    @property
    def of_address_space(self) -> bool:
        """Whether addresses are counted, each process's own, and not resident memory."""
        return self.name in ADDRESS_SPACE

    def retained(self, resident_share: float) -> float:
        """The part of freed activations that still counts, where `resident_share` of them stays resident.

        The C library gives pages back to the kernel but keeps their addresses: under a limit of address space all of them count
        (measured: 0.83 to 0.93 of them).
        """
        return 1.0 if self.of_address_space else resident_share


def could_bind(limit: Limit, needs: Needs, activation_bytes: int) -> bool:
    """Whether passes of the planned size might come anywhere near a limit."""
    each = needs.to_come + needs.gradients + max(activation_bytes, needs.step + int(limit.retained(needs.retained) * activation_bytes))
    return limit.used_bytes + limit.shares * each > COULD_BIND * limit.limit_bytes


def room_for_activations(limit: Limit, needs: Needs, high_watermark: float) -> float:
    """Bytes that one rank's forward pass may take below the high watermark of this limit; negative where there is no room."""
    fixed = limit.used_bytes + limit.shares * (needs.to_come + needs.gradients)
    left = max(0, limit.limit_bytes - fixed)
    allowed = max(high_watermark * limit.limit_bytes, fixed + left / 4) - MARGIN * limit.limit_bytes
    at_loss = (allowed - fixed) / limit.shares
    at_step = at_loss - needs.step
    retained = limit.retained(needs.retained)
    return min(at_loss, at_step / retained if retained > 0 else at_loss)


def starting_plan(default: MemoryPlan, bounds: PlanBounds, plain: PeakLine, checkpointed: PeakLine | None, room_bytes: float) -> MemoryPlan:
    """The plan whose largest pass is predicted to fit: `default` where that does, else bounded in tokens, else recomputing too.

    Where the doctor was more careful than the measurement asks for, its bound on rows gives way to the bound on tokens.
    """
    longest, whole = bounds.longest_tokens, bounds.most_rows * bounds.longest_tokens
    line = checkpointed if default.activation_checkpointing and checkpointed else plain
    tokens = line.tokens_that_fit(room_bytes, longest)
    careful = 0 < default.micro_batch_rows < bounds.most_rows
    if tokens >= largest_micro_batch(default, bounds).tokens and not careful:
        return default
    rows = bounds.most_rows if careful else default.micro_batch_rows
    plan = default.model_copy(update={"micro_batch_rows": rows})
    if tokens >= whole:
        return plan
    if tokens < longest and bounds.may_checkpoint and not default.activation_checkpointing and checkpointed is not None:
        tokens = checkpointed.tokens_that_fit(room_bytes, longest)
        plan = plan.model_copy(update={"activation_checkpointing": True})
        if tokens >= whole:
            return plan
    return plan.model_copy(update={"micro_batch_tokens": max(SMALLEST_TOKENS, tokens)})
