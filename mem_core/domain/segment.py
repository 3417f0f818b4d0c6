"""How a segment ended: a closed union, classified once at the edge, each member with its evidence."""

from typing import Annotated, Literal

from pydantic import Field

from mem_core.domain.errors import EnvironmentUnfit, MemError, PolicyRefused, RequestError
from mem_core.domain.units import Value

Phase = Literal[
    "start",
    "op_build",
    "calibrate",
    "restore",
    "first_step",
    "forward",
    "backward",
    "step",
    "save",
    "evaluate",
    "sample",
    "data",
    "idle",
    "validate",
]


class Evidence(Value):
    """What was seen from outside when something went wrong."""

    rank: int | None = None
    phase: Phase | None = None
    batch_index: int | None = None
    restoring_step: int | None = Field(default=None, description="The checkpoint that was being loaded, where that is what failed.")
    exception: str = ""
    exit_code: int | None = None
    signal: str = ""
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    limit_name: str = Field(default="", description="The limit that binds, as the doctor names it.")
    worked_tokens: int | None = Field(default=None, description="Padded tokens of the largest pass that this process did before.")
    grown: bool = Field(default=False, description="A pass of the size that failed worked before, and the process has grown since.")
    process_steps: int | None = Field(default=None, description="Steps that the process had done since it was made.")
    used_bytes: int | None = Field(default=None, description="What tensors held on the device when an allocation failed.")
    reserved_bytes: int | None = Field(default=None, description="What the device's caching allocator held then, used or not.")
    failed_rows: int | None = Field(default=None, description="Rows of the forward pass that did not fit.")
    failed_length: int | None = Field(default=None, description="Padded tokens of each of its rows.")
    last_lines: tuple[str, ...] = ()
    stacks: str = ""


class SegmentCompleted(Value):
    """All steps up to `to_step` were applied and the state is staged for commit. `added_loss_last`: what the model adds to its loss by
    itself, which `loss_last` leaves out; None where it adds nothing."""

    kind: Literal["completed"] = "completed"
    from_step: int
    to_step: int
    batch_index: int
    skipped_steps: int = 0
    loss_first: float
    loss_last: float
    added_loss_last: float | None = None
    tokens: int
    duration_s: float
    peak_bytes: int = 0
    trajectory_digest: str
    weights_digest: str = ""


class OutOfMemory(Value):
    """A real allocation failure, or a kill that looks like one."""

    kind: Literal["out_of_memory"] = "out_of_memory"
    memory: Literal["device", "host"]
    evidence: Evidence


class WorkerLost(Value):
    """A rank process ended that should not have: signal, exit, or never started."""

    kind: Literal["worker_lost"] = "worker_lost"
    cause: str
    evidence: Evidence


class Hung(Value):
    """No heartbeat within the deadline of the phase."""

    kind: Literal["hung"] = "hung"
    waited_s: float
    evidence: Evidence


class NonFinite(Value):
    """Loss, gradient or weights are not finite numbers."""

    kind: Literal["non_finite"] = "non_finite"
    what: Literal["loss", "gradient", "weights", "loss_scale", "loss_spike"]
    batch_index: int
    sample_ids: tuple[int, ...] = ()
    evidence: Evidence = Evidence()


REFUSALS: tuple[type[MemError], ...] = (RequestError, PolicyRefused, EnvironmentUnfit)


class Refusal(Value):
    """An error that no other process can mend, as plain values, so that it keeps its kind on the way out of a rank."""

    exit_code: int
    problem: str
    remedy: str
    field: str = ""
    value: str | None = None
    bound: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Refusal | None":
        """None where `error` is of a kind that another try may mend."""
        if not isinstance(error, REFUSALS):
            return None
        return cls(
            exit_code=error.exit_code, problem=error.problem, remedy=error.remedy, field=error.field, value=error.value, bound=error.bound
        )

    @property
    def error(self) -> MemError:
        """The error again, of its own kind."""
        kind = next((kind for kind in REFUSALS if kind.exit_code == self.exit_code), EnvironmentUnfit)
        return kind(self.problem, remedy=self.remedy, field=self.field, value=self.value, bound=self.bound)


class WorkerError(Value):
    """An exception in a rank that is none of the other kinds."""

    kind: Literal["worker_error"] = "worker_error"
    evidence: Evidence
    refusal: Refusal | None = Field(default=None, description="What the rank refused in MEM's own words: no other try can mend it.")
    before_any_step: bool = Field(
        default=False,
        description="The process had applied no step, and nothing says that the error passes: where a fresh process meets the same one, "
        "it stays. False for what a peer, a store or a drill has done.",
    )


class SaveFailed(Value):
    """The state could not be written or committed (disk full, store away)."""

    kind: Literal["save_failed"] = "save_failed"
    evidence: Evidence


class SegmentInterrupted(Value):
    """Asked to stop; `to_step` is the last applied step that was staged."""

    kind: Literal["interrupted"] = "interrupted"
    by: str
    to_step: int
    batch_index: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    tokens: int = 0
    duration_s: float = 0.0
    peak_bytes: int = 0
    trajectory_digest: str = ""
    weights_digest: str = ""


SegmentOutcome = Annotated[
    SegmentCompleted | OutOfMemory | WorkerLost | Hung | NonFinite | WorkerError | SaveFailed | SegmentInterrupted,
    Field(discriminator="kind"),
]
SegmentFailure = OutOfMemory | WorkerLost | Hung | NonFinite | WorkerError | SaveFailed


def describe_failure(failure: SegmentFailure) -> str:
    """One line for people: what, where, with which numbers."""
    evidence = failure.evidence
    where = "".join(
        (
            f" rank {evidence.rank}" if evidence.rank is not None else "",
            f" in {evidence.phase}" if evidence.phase else "",
            f" of step {evidence.restoring_step}" if evidence.restoring_step is not None else "",
            f" at batch {evidence.batch_index}" if evidence.batch_index is not None and evidence.restoring_step is None else "",
        )
    )
    match failure:
        case OutOfMemory():
            what = f"out of {failure.memory} memory"
        case WorkerLost():
            what = f"worker lost ({failure.cause})"
        case Hung():
            what = f"no heartbeat for {failure.waited_s:.1f} s"
        case NonFinite():
            what = f"{failure.what} not finite at batch {failure.batch_index}"
        case WorkerError():
            what = "error in the worker"
        case SaveFailed():
            what = "save failed"
    return f"{what}{':' if where else ''}{where}{' (' + evidence.exception + ')' if evidence.exception else ''}"


def last_words(evidence: Evidence, num_lines: int = 12) -> str:
    """What the process said last, for people: some lines under a heading; empty where it said nothing."""
    lines = [line for line in evidence.last_lines if line.strip()][-num_lines:]
    if not lines:
        return ""
    who = f"rank {evidence.rank}" if evidence.rank is not None else "the process"
    return "\n".join((f"last lines of {who}:", *(f"    {line[:300]}" for line in lines)))
