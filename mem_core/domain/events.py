"""The journal's typed events: the one record from which state, report and result are folded.

Every event is plain JSON. Names and fields are frozen: fields may be added with a default, never renamed.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.plan import CandidatePlan, MemoryPlanChange
from mem_core.domain.policy import PolicyDecision
from mem_core.domain.results.evaluation import SetFigures, StoppedEarly
from mem_core.domain.results.exports import ExportSummary
from mem_core.domain.results.origin import ForkOrigin
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.run import DataSummary
from mem_core.domain.segment import SegmentOutcome
from mem_core.domain.units import Value


class AttemptStarted(Value):
    """A process began to drive the run. `attempt` is the fencing number (I6)."""

    event: Literal["attempt_started"] = "attempt_started"
    attempt: int
    pid: int
    host: str
    resumed_step: int | None = None
    note: str = ""


class DoctorReported(Value):
    """The environment as seen before training."""

    event: Literal["doctor_reported"] = "doctor_reported"
    report: EnvironmentReport


class DataPrepared(Value):
    """The rows that this attempt trains on are ready."""

    event: Literal["data_prepared"] = "data_prepared"
    data: DataSummary


class PolicyDecided(Value):
    """One decision, recorded before its segment and replayed on resume. Everything needed to recompute it is here."""

    event: Literal["policy_decided"] = "policy_decided"
    segment_index: int
    plan: CandidatePlan
    directive_text: str | None = Field(None, description="The planner's reply as received, size-limited.")
    inputs: dict[str, Any] = {}
    decision: PolicyDecision


class SegmentStarted(Value):
    """Workers were told to train from `from_step` until `until_step`."""

    event: Literal["segment_started"] = "segment_started"
    segment_index: int
    from_step: int
    until_step: int
    try_number: int = 1


class MemoryPlanChanged(Value):
    """Splits follow another plan from a batch on; recorded before the first forward under it."""

    event: Literal["memory_plan_changed"] = "memory_plan_changed"
    change: MemoryPlanChange
    observed_bytes: int = 0
    limit_bytes: int = 0


class SegmentEnded(Value):
    """How the segment ended."""

    event: Literal["segment_ended"] = "segment_ended"
    segment_index: int
    outcome: SegmentOutcome


class CheckpointSealed(Value):
    """A checkpoint is durable under a name that nobody reads, and is about to take its place at `step`.

    Said before it can be seen there, so that the journal names every manifest that a later start may find (whatever crashes between).
    """

    event: Literal["checkpoint_sealed"] = "checkpoint_sealed"
    step: int
    manifest_sha256: str
    weights_digest: str = ""
    trajectory_digest: str = ""


class CheckpointCommitted(Value):
    """Files and manifest are durable; not yet judged. `manifest_sha256`: of the manifest's bytes; empty in journals of older versions."""

    event: Literal["checkpoint_committed"] = "checkpoint_committed"
    step: int
    size_bytes: int
    duration_s: float
    weights_digest: str = ""
    trajectory_digest: str = ""
    manifest_sha256: str = ""


class CheckpointJudged(Value):
    """A verdict was reached."""

    event: Literal["checkpoint_judged"] = "checkpoint_judged"
    verdict: CheckpointVerdict


class CheckpointRemoved(Value):
    """Rotation or quarantine took a checkpoint away."""

    event: Literal["checkpoint_removed"] = "checkpoint_removed"
    step: int
    reason: str


class CheckpointMirrored(Value):
    """A proven checkpoint has a copy in the remote store, or (`problem`) could not get one; training goes on either way."""

    event: Literal["checkpoint_mirrored"] = "checkpoint_mirrored"
    step: int
    url: str = ""
    problem: str = ""


class Resumed(Value):
    """This attempt took a checkpoint up: work goes on from it, or there is nothing left to do."""

    event: Literal["resumed"] = "resumed"
    step: int
    batch_index: int
    tokens: int = 0
    weights_digest: str = ""
    trajectory_digest: str = ""


class Forked(Value):
    """This run began with the whole state of another one's checkpoint."""

    event: Literal["forked"] = "forked"
    origin: ForkOrigin


class OomAbsorbed(Value):
    """A real allocation failure was survived inside the run."""

    event: Literal["oom_absorbed"] = "oom_absorbed"
    batch_index: int
    memory: Literal["device", "host"]
    phase: str
    detail: str = ""


class FaultMet(Value):
    """Something failed; `step` is the validated step that the run goes on from."""

    event: Literal["fault_met"] = "fault_met"
    kind: str
    step: int
    detail: str = ""


class Recovered(Value):
    """The first step after a fault was done again."""

    event: Literal["recovered"] = "recovered"
    kind: str
    step: int
    recovered_s: float


class Evaluated(Value):
    """Validation loss at a step."""

    event: Literal["evaluated"] = "evaluated"
    step: int
    validation_loss: float
    validation_rows: int | None = Field(default=None, description="Held-out rows that it is the loss of.")
    validation_rows_total: int | None = Field(default=None, description="All held-out rows.")
    sets: dict[str, SetFigures] = Field(default={}, description="Every set by its name, the first of them above; empty in older journals.")


class Sampled(Value):
    """Every prompt was answered with the weights of a step: all of them in one line, so that none stands there twice or alone."""

    event: Literal["sampled"] = "sampled"
    found: StepSamples


class RunStoppedEarly(Value):
    """The loss of the first set has not fallen for as many evaluations as the request has patience for: the run ends here, completed."""

    event: Literal["stopped_early"] = "stopped_early"
    stopped: StoppedEarly


class Exported(Value):
    """The end of the run as a model folder, or why there is none."""

    event: Literal["exported"] = "exported"
    summary: ExportSummary


class FiguresLogged(Value):
    """Where the run's figures can be looked at, beside its own page. Without credentials."""

    event: Literal["figures_logged"] = "figures_logged"
    logger: str
    address: str


class TimeSpent(Value):
    """Seconds by goodput bucket since the previous `time_spent` of this attempt."""

    event: Literal["time_spent"] = "time_spent"
    seconds: dict[str, float]


class BatchSkipped(Value):
    """From now on this batch is left out, since it failed and the user allows it. Recorded before the next try."""

    event: Literal["batch_skipped"] = "batch_skipped"
    batch_index: int
    sample_ids: tuple[int, ...] = ()
    reason: str = ""


class Noted(Value):
    """Anything a person reading the journal should know."""

    event: Literal["noted"] = "noted"
    text: str


class RunEnded(Value):
    """The attempt is over."""

    event: Literal["run_ended"] = "run_ended"
    status: Literal["completed", "interrupted", "failed"]
    exit_code: int
    message: str = ""


Event = Annotated[
    AttemptStarted | DoctorReported | DataPrepared | PolicyDecided | SegmentStarted | MemoryPlanChanged | SegmentEnded | CheckpointSealed
    | CheckpointCommitted | CheckpointJudged | CheckpointRemoved | CheckpointMirrored | Resumed | OomAbsorbed | FaultMet | Recovered
    | BatchSkipped | Evaluated | Sampled | RunStoppedEarly | Exported | Forked | FiguresLogged | TimeSpent | Noted | RunEnded,
    Field(discriminator="event"),
]  # fmt: skip
EVENT_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


GENESIS_SHA256 = "0" * 64  # what the first line of a journal names as the digest of the line before it


class JournalLine(Value):
    """One line: position, time, writer, event, and the SHA-256 of the previous line so that an edited history shows."""

    sequence: int
    time_unix_s: float
    attempt: int
    previous_sha256: str
    event: Event
