"""Where a run is and how it ended, both folded from the journal."""

from typing import Any, Literal

from pydantic import Field

from mem_core.domain.units import Value

RunStatus = Literal["completed", "interrupted", "failed", "running"]
GOODPUT_BUCKETS = (
    "productive", "redone", "start", "op_build", "data", "save_stall", "restore", "restart", "oom_recovery", "evaluation",
    "planner_wait", "validation_wait", "idle",
)  # fmt: skip


class FaultRecord(Value):
    """A fault that the run met; `recovered_s` is None while (or if never) recovered."""

    kind: str
    step: int
    recovered_s: float | None = None
    detail: str = ""


class CheckpointCounts(Value):
    """Checkpoints of the run by fate."""

    written: int = 0
    validated: int = 0
    rejected: int = 0
    kept: int = 0


class PolicyCounts(Value):
    """Decisions of the policy engine."""

    decisions: int = 0
    clamped: int = 0
    refused: int = 0


class Goodput(Value):
    """Seconds by bucket; they sum to the wall time. `fraction` is productive ÷ all."""

    fraction: float = 0.0
    seconds: dict[str, float] = {}


class MemorySummary(Value):
    """Memory over the run."""

    peak_bytes: int = 0
    budget_bytes: int = 0
    binding_limit: str = ""
    plan_changes: tuple[dict[str, Any], ...] = Field((), description="Each change of the micro-batch plan, with its reason.")


class RunResult(Value):
    """How a run ended (or stands). The frozen answer of `mem train --json` and of the flow."""

    status: RunStatus
    run_id: str
    exit_code: int = 0
    message: str = ""
    applied_steps: int = 0
    skipped_steps: int = 0
    trajectory_digest: str = ""
    weights_digest: str = ""
    loss_first: float | None = None
    loss_last: float | None = None
    validation_loss: float | None = None
    tokens: int = 0
    tokens_per_s: float = 0.0
    restarts: int = 0
    ooms_absorbed: int = 0
    ooms_fatal: int = 0
    faults: tuple[FaultRecord, ...] = ()
    checkpoints: CheckpointCounts = CheckpointCounts()
    policy: PolicyCounts = PolicyCounts()
    goodput: Goodput = Goodput()
    memory: MemorySummary = MemorySummary()
    device: str = ""
    report_url: str = ""
    run_folder: str = ""
