"""How failures are bounded, and faults on purpose."""

from typing import Annotated, Literal

from pydantic import Field

from mem_core.domain.fault_kinds import FAULT_KINDS
from mem_core.domain.request.section import Section


class ResilienceSection(Section):
    """How failures are bounded."""

    max_failures_without_progress: int = Field(
        default=3, ge=1, le=100, description="Restarts allowed while the validated step does not advance."
    )
    segment_deadline_s: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto", description="Longest a segment may take; auto learns it."
    )
    hang_factor: float = Field(default=5, ge=2, le=1_000, description="A step this many times slower than usual counts as hung.")
    on_poisoned_batch: Literal["fail", "skip"] = Field(
        default="fail", description="A batch that fails again and again: report it and stop, or leave it out and go on."
    )
    on_non_finite: Literal["retry", "skip", "lower_lr", "fail"] = Field(
        default="retry", description="A loss or gradient that is not finite: roll back and then try again, skip, lower the rate, or stop."
    )
    max_skipped_batches: int = Field(default=100, ge=1, le=1_000_000, description="How many batches may be left out in one run.")
    loss_spike_factor: Annotated[float, Field(ge=5)] | None = Field(
        default=None, description="A loss this many robust deviations above the recent median counts as not finite; null never."
    )
    preemption_file: str | None = Field(
        default=None, min_length=1, description="When this file appears, commit and stop with exit code 75, as at SIGTERM."
    )


class ChaosSection(Section):
    """Real faults on purpose, for drills."""

    seed: int = Field(default=0, ge=0, description="Seed of the fault plan.")
    every_s: float | None = Field(default=None, gt=0, description="Mean seconds between faults; not used where at_steps is given.")
    at_steps: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, description="Steps at which to inject.")
    kinds: tuple[str, ...] | None = Field(
        default=None, description=f"Kinds of fault; null means all that this machine allows. There are: {', '.join(FAULT_KINDS)}."
    )
