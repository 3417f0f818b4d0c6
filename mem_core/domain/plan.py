"""How a segment would run: steps, memory plan, hyper-parameters. All of it is recorded before the first forward."""

from typing import Literal

from pydantic import Field

from mem_core.domain.units import Value


class Hyperparams(Value):
    """The values that reach the engine for one segment, after policy. The learning rate is base schedule × lr_multiplier."""

    lr_multiplier: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    gradient_clip_norm: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    loss_scale_initial_power: int = Field(default=10, ge=0)


class MemoryPlan(Value):
    """The limits under which a global batch is split; the split itself is a pure function of these and the row lengths.

    `micro_batch_rows` and `micro_batch_tokens` (padded) bound one forward pass of one rank; 0 means no bound of that kind.
    """

    micro_batch_rows: int = Field(ge=0)
    micro_batch_tokens: int = Field(default=0, ge=0)
    activation_checkpointing: bool = False
    offload_optimizer: Literal["none", "cpu"] = "none"


class MemoryPlanChange(Value):
    """From `batch_index` on, splits follow `plan`. The recorded list of changes is what a redone step and a twin replay."""

    batch_index: int = Field(ge=0)
    plan: MemoryPlan
    reason: str
    failed_tokens: int = Field(default=0, ge=0, description="Padded tokens of a forward pass that really failed; 0 where none did.")
    limit_bytes: int = Field(default=0, ge=0, description="The limit that it failed under: growth stays below until that is raised.")


class CandidatePlan(Value):
    """What would happen in the next segment unless the policy engine says otherwise."""

    segment_index: int = Field(ge=0)
    from_step: int = Field(ge=0)
    until_step: int = Field(ge=1)
    hyperparams: Hyperparams
    memory: MemoryPlan


def plan_at(changes: tuple[MemoryPlanChange, ...], batch_index: int, default: MemoryPlan) -> MemoryPlan:
    """The plan in force at `batch_index`: of the changes at or before it, the one recorded last wins."""
    plan = default
    for change in changes:
        if change.batch_index <= batch_index:
            plan = change.plan
    return plan


def record_change(changes: tuple[MemoryPlanChange, ...], change: MemoryPlanChange) -> tuple[MemoryPlanChange, ...]:
    """Add a change; it overrides whatever was recorded for its own step and later ones."""
    return (*(old for old in changes if old.batch_index < change.batch_index), change)
