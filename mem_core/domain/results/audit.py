"""What an audit found: parts of a run that somebody trained again, held against what the run's journal says was committed."""

from typing import Literal

from pydantic import Field

from mem_core.domain.plan import Hyperparams
from mem_core.domain.units import Value

AuditStatus = Literal["equal", "different", "unproven", "not_redone"]
"""equal: to the bit. different: it came to something else than the run recorded. unproven: the checkpoint that it begins with is not what
it says it is. not_redone: this machine could not train it, which says nothing about the run."""


class AuditedOn(Value):
    """What the bits of a step depend on beside the run itself."""

    cpu: str = Field(default="", description="Name and vector instructions; empty where it was not recorded.")
    versions: dict[str, str] = {}


class DigestPair(Value):
    """A digest as the journal names it and as it was redone. Empty: not recorded, or not redone."""

    recorded: str = ""
    redone: str = ""

    @property
    def differs(self) -> bool:
        """Whether both are there and are not the same."""
        return bool(self.recorded and self.redone) and self.recorded != self.redone


class AuditDistances(Value):
    """How far what was redone is from what was recorded; 0 where it is the same, None where one side is missing.

    `loss` and `grad_norm`: largest relative difference of a step. `weights`: norm of the difference of all weights over the norm of the
    recorded ones, where the checkpoint at the end is still there.
    """

    loss: float | None = None
    grad_norm: float | None = None
    weights: float | None = None


class AuditedSegment(Value):
    """Steps `from_step` (exclusive) to `to_step` (inclusive), from one checkpoint to the next commit that the journal names."""

    from_step: int = Field(ge=0)
    to_step: int = Field(ge=1)
    begins_with: Literal["checkpoint", "fresh weights"] = "checkpoint"
    status: AuditStatus
    reasons: tuple[str, ...] = Field(default=(), description="Why it is not equal.")
    num_ranks: int = 1
    zero_stage: int = 1
    threads_per_rank: int = 1
    hyperparams: tuple[Hyperparams, ...] = Field(default=(), description="Recorded values that it was redone with, in order.")
    left_out_batches: tuple[int, ...] = Field(default=(), description="Batches that the run left out, and that were left out again.")
    num_plan_changes: int = Field(default=0, description="Recorded changes of the micro-batch plan within it, followed again.")
    steps_compared: int = Field(default=0, description="Steps whose recorded numbers were compared one by one.")
    weights_digest: DigestPair = DigestPair()
    trajectory_digest: DigestPair = DigestPair()
    distance: AuditDistances = AuditDistances()
    trained_on: AuditedOn = AuditedOn()
    duration_s: float = 0.0

    @property
    def num_steps(self) -> int:
        """Applied updates."""
        return self.to_step - self.from_step


class AuditCoverage(Value):
    """How much of a run was trained again, and how much could have been. Steps are applied updates that the journal says are committed."""

    committed_steps: int = 0
    possible_segments: int = 0
    possible_steps: int = 0
    redone_steps: int = 0

    @property
    def redone_share(self) -> float:
        """Of the run's committed steps."""
        return self.redone_steps / self.committed_steps if self.committed_steps else 0.0


class AuditCertificate(Value):
    """The answer of `mem audit`. `equal` only where every segment that was drawn came to the same bits and nothing speaks against the
    record."""

    audit_version: Literal[1] = 1
    equal: bool
    run_id: str
    place: str = Field(description="Where the run lay, without credentials.")
    seed: int
    asked_segments: int
    segments: tuple[AuditedSegment, ...]
    coverage: AuditCoverage
    redone_share: float = Field(description="Of the run's committed steps.")
    findings: tuple[str, ...] = Field(
        default=(), description="What speaks against record, journal or checkpoints, without any step redone."
    )
    not_audited: tuple[str, ...] = Field(default=(), description="Steps that nobody can train again from what is there, and why.")
    notes: tuple[str, ...] = Field(default=(), description="Where this machine is another than the one that trained.")
    device: str
    dtype: str
    last_step: int = Field(description="The newest commit that the journal names, with its digests.")
    weights_digest: str
    trajectory_digest: str
    journal_sha256: str = Field(description="Of names and contents of all the journal's files: what this certificate is about.")
    record_sha256: str = Field(description="Of the record that says what the run is.")
    audited_on: AuditedOn
    issued_unix_s: float
    duration_s: float = 0.0
