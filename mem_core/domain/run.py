"""Where a run is and how it ended, both folded from the journal."""

from typing import Any, Literal

from pydantic import Field

from mem_core.domain.plan import Hyperparams, MemoryPlanChange
from mem_core.domain.results.evaluation import BestStep, SetFigures, StoppedEarly
from mem_core.domain.results.exports import ExportSummary
from mem_core.domain.results.origin import ForkOrigin
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.units import Value

RunStatus = Literal["completed", "interrupted", "failed", "running"]
GOODPUT_BUCKETS = (
    "productive", "redone", "start", "op_build", "data", "save_stall", "restore", "restart", "oom_recovery", "evaluation",
    "planner_wait", "validation_wait", "idle", "between_attempts",
)  # fmt: skip
BETWEEN_ATTEMPTS = "between_attempts"  # nobody had asked for the run to go on: no loss of the machine's


class FaultRecord(Value):
    """A fault that the run met; `recovered_s` is None while (or if never) recovered.

    `step` is where the run went on from, `reached_step` the last step done when it struck (None: not known).
    """

    kind: str
    step: int
    recovered_s: float | None = None
    detail: str = ""
    reached_step: int | None = None
    time_unix_s: float = 0.0


class CheckpointCounts(Value):
    """Checkpoints of the run by fate."""

    written: int = 0
    validated: int = 0
    rejected: int = 0
    kept: int = 0


class MirrorSummary(Value):
    """How far the copies in the remote store are. `missing_steps` are proven, kept here, and newer than the newest copy."""

    url: str = ""
    at_step: int | None = None
    of_step: int | None = None
    missing_steps: tuple[int, ...] = ()
    problem: str = Field(default="", description="Why the newest one has no copy.")

    @property
    def behind(self) -> bool:
        """Whether a machine that has nothing but the copies would have to do proven steps again."""
        return self.of_step is not None and (self.at_step is None or self.at_step < self.of_step)

    def __str__(self) -> str:
        """For people: `mirror at 20 of 40`."""
        at = "none" if self.at_step is None else f"{self.at_step}"
        why = f" ({self.problem})" if self.behind and self.problem else ""
        return f"mirror at {at} of {self.of_step if self.of_step is not None else 'none'}{why}"


class PolicyCounts(Value):
    """Decisions of the policy engine."""

    decisions: int = 0
    clamped: int = 0
    refused: int = 0


class Goodput(Value):
    """Seconds by bucket; they sum to the wall time. `fraction` is productive ÷ all in which an attempt lived."""

    fraction: float = 0.0
    seconds: dict[str, float] = {}

    @property
    def lived_s(self) -> float:
        """Seconds in which an attempt lived: all but those between attempts."""
        return sum(value for name, value in self.seconds.items() if name != BETWEEN_ATTEMPTS)


class MemorySummary(Value):
    """Memory over the run."""

    peak_bytes: int = 0
    budget_bytes: int = 0
    binding_limit: str = ""
    plan_changes: tuple[dict[str, Any], ...] = Field(default=(), description="Each change of the micro-batch plan, with its reason.")


class SourceShare(Value):
    """A source of the rows that are trained on, where any has a weight, and its part in an epoch."""

    path: str
    weight: float
    num_documents: int = Field(default=0, description="Those that are held out too.")
    num_rows: int = 0
    num_tokens: int = 0
    epoch_rows: int = Field(default=0, description="Rows of it that an epoch shows.")
    epoch_tokens: int = Field(default=0, description="Tokens of those rows, on the average.")


class DataSummary(Value):
    """What an attempt trained on, and what of the files it does not train on."""

    num_files: int = 0
    num_documents: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    trained_tokens: int = Field(default=0, description="Label positions that count, over one epoch.")
    steps_per_epoch: float | None = Field(default=None, description="Updates that see every training row once.")
    num_validation_sequences: int = 0
    num_bad_rows: int = 0
    bad_rows: tuple[str, ...] = Field(default=(), description="file:line: reason, the first ten.")
    dropped_rows: dict[str, int] = Field(
        default={}, description="Rows and sequences that are fine and not trained on, or not whole, by kind."
    )
    document_tokens: dict[str, int] = Field(
        default={}, description="Tokens of a document before it is cut: p5, p50, p95, p99, longest; empty in older records."
    )
    num_copies: int = Field(default=0, description="Documents whose content was there before, among the first two million.")
    sources: tuple[SourceShare, ...] = Field(default=(), description="Where any source of the rows has a weight.")
    notes: tuple[str, ...] = ()


class LiveStep(Value):
    """Where a run is right now, as its driver said at `time_unix_s`. `left_s`: until the last step, at the rate of the last minute."""

    attempt: int
    time_unix_s: float
    segment_index: int
    until_step: int
    step: int
    total_steps: int
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None
    loss: float | None = None
    phase: str = ""


class RunResult(Value):
    """How a run ended (or stands). The frozen answer of `mem train --json` and of the flow."""

    status: RunStatus
    run_id: str
    exit_code: int = 0
    message: str = ""
    applied_steps: int = 0
    skipped_steps: int = 0
    epochs: float | None = Field(default=None, description="How often every training row was seen; None where it is not known.")
    trajectory_digest: str = ""
    weights_digest: str = ""
    loss_first: float | None = None
    loss_last: float | None = None
    validation_loss: float | None = None
    validation_rows: int | None = None
    validation_rows_total: int | None = None
    evaluation: dict[str, SetFigures] = Field(default={}, description="The last figures of each set of held-out rows, by its name.")
    best: BestStep | None = Field(
        default=None, description="None without evaluation; its checkpoint stays where evaluation.keep_best asks."
    )
    stopped_early: StoppedEarly | None = Field(default=None, description="Where and why, if evaluation.patience ended the run.")
    samples: StepSamples | None = Field(
        default=None, description="The last answers to evaluation.prompts; the journal has the earlier ones."
    )
    tokens: int = 0
    tokens_per_s: float = 0.0
    restarts: int = 0
    ooms_absorbed: int = 0
    ooms_fatal: int = 0
    faults: tuple[FaultRecord, ...] = ()
    checkpoints: CheckpointCounts = CheckpointCounts()
    mirror: MirrorSummary | None = Field(default=None, description="None where nothing was ever to be copied to a remote store.")
    policy: PolicyCounts = PolicyCounts()
    goodput: Goodput = Goodput()
    memory: MemorySummary = MemorySummary()
    data: DataSummary | None = Field(default=None, description="None where no data was prepared yet, or by an older version.")
    export: ExportSummary | None = Field(default=None, description="The model folder at the end; None where none was to be made.")
    forked_from: ForkOrigin | None = Field(default=None, description="Of a run that began with another one's checkpoint.")
    logged_to: dict[str, str] = Field(default={}, description="Where its figures can be looked at, by the name of the logger.")
    live: LiveStep | None = Field(default=None, description="Where a run that goes on is right now; only `mem status` knows it.")
    device: str = ""
    report_url: str = ""
    run_folder: str = ""


class RepeatedFailure(Value):
    """The same kind of failure at the same batch, `count` times in a row: from 2 on, the batch itself is under suspicion."""

    kind: str
    batch_index: int
    count: int = 1


class DecidedSegment(Value):
    """What the policy engine decided for one segment; replayed when the segment is done again."""

    segment_index: int
    from_step: int
    until_step: int
    hyperparams: Hyperparams
    allow: bool = True
    reason: str = ""


class RunState(Value):
    """Where a run is, as its journal tells it. What to resume from is decided by the checkpoints on disk, not by this.

    `batch_index == applied_steps + skipped_steps` (I3). `highest_step` is the highest step ever done, also in work that was
    lost, so that redone seconds can be told from productive ones. `failures_without_progress` counts failed segments since the
    validated step last rose above every earlier one; an attempt that follows an orderly end starts the count anew, since
    somebody chose to go on. `kills_without_progress` counts attempts that ended without a word in the same span.
    """

    attempt: int = 0
    last_status: RunStatus = "running"
    applied_steps: int = 0
    batch_index: int = 0
    skipped_steps: int = 0
    tokens: int = 0
    highest_step: int = 0
    newest_validated_step: int | None = None
    newest_committed_step: int | None = None
    failures_without_progress: int = 0
    kills_without_progress: int = 0
    repeated_failure: RepeatedFailure | None = None
    memory_plan_changes: tuple[MemoryPlanChange, ...] = ()
    decided: tuple[DecidedSegment, ...] = Field(default=(), description="The last decision of each segment, by segment_index.")
    restarts: int = 0
    ooms_absorbed: int = 0
    ooms_fatal: int = 0
