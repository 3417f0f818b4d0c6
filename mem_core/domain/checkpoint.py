"""What was written for a checkpoint, and what was proven about it."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from mem_core.domain.plan import Hyperparams, MemoryPlanChange
from mem_core.domain.units import Value

MANIFEST_NAME = "manifest.json"
VERDICT_NAME = "verdict.json"
SIGNATURE_NAME = "signature.json"
ASIDE_NAME = "aside.json"  # why a checkpoint that is whole was set aside; its own verdict stays beside it
OWN_NAMES = frozenset({MANIFEST_NAME, VERDICT_NAME, SIGNATURE_NAME, ASIDE_NAME})
_CHECKPOINT_NAME = re.compile(r"^step-(\d{9,})$")


class FileEntry(Value):
    """One file of a checkpoint. `path` is relative to the checkpoint folder and stays inside it."""

    path: str
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @field_validator("path")
    @classmethod
    def _inside(cls, value: str) -> str:
        # One file has one name: `./x` and `a//b` are second names for `x` and `a/b`, and a list of names would not see that.
        if any(part in ("", ".", "..") for part in value.split("/")) or "\\" in value or "\0" in value or value in OWN_NAMES:
            raise ValueError(f"path {value!r} must be relative, plain, inside the checkpoint folder, and not one of MEM's own files")
        return value


class TrainingPosition(Value):
    """Where a run is: everything beside tensors that resume needs (I2)."""

    applied_steps: int = Field(ge=0)
    batch_index: int = Field(ge=0)
    skipped_batches: tuple[int, ...] = ()
    passed_batches: tuple[int, ...] = Field(
        default=(), description="Of the skipped ones those that were left out: the engine never saw them."
    )
    tokens: int = Field(default=0, ge=0)
    trajectory_digest: str = ""
    hyperparams: Hyperparams = Hyperparams()
    hyperparams_history: tuple[tuple[int, Hyperparams], ...] = Field(
        default=(), description="(first batch index, values) of every segment so far where they changed."
    )
    memory_plan_changes: tuple[MemoryPlanChange, ...] = ()


class CheckpointManifest(Value):
    """The record of one checkpoint. Version 1 loads for ever. Written last: a reader trusts only a complete manifest."""

    manifest_version: Literal[1] = 1
    run_id: str
    attempt: int = Field(ge=1)
    step: int = Field(ge=0)
    num_ranks: int = Field(ge=1)
    zero_stage: int = Field(ge=0, le=3)
    position: TrainingPosition
    weights_digest: str = ""
    parameters: dict[str, tuple[int, ...]] = Field(default={}, description="Name -> shape of each trained parameter.")
    request_sha256: str = ""
    data_fingerprint: str = ""
    versions: dict[str, str] = {}
    files: tuple[FileEntry, ...] = Field(min_length=1)
    created_unix_s: float = 0.0
    extra: dict[str, Any] = {}
    birth: dict[str, Any] = Field(default={}, description="What the run was born with (core/run/belonging.py); older manifests have none.")
    manifest_sha256: str = Field(default="", description="Its own digest: SHA-256 of its canonical bytes with this field empty.")

    @field_validator("files")
    @classmethod
    def _unique(cls, value: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        paths = [entry.path for entry in value]
        if len(set(paths)) != len(paths):
            raise ValueError("a file is listed twice")
        return value


class CheckpointDraft(Value):
    """What the trainer knows about a checkpoint before it is committed; `commit` adds files, writer and digests."""

    position: TrainingPosition
    weights_digest: str = ""
    parameters: dict[str, tuple[int, ...]] = Field(default={}, description="Empty: those of the manager's expectation.")
    request_sha256: str = ""
    data_fingerprint: str = ""
    versions: dict[str, str] = {}
    extra: dict[str, Any] = Field(default={}, description="Plain JSON only; the recorded next steps of a replay verdict live here.")


class CheckpointExpectation(Value):
    """What a run can resume from: its ranks, its ZeRO stage, its trained parameters (name -> shape)."""

    num_ranks: int = Field(ge=1)
    zero_stage: int = Field(ge=0, le=3)
    parameters: dict[str, tuple[int, ...]] = {}


class CheckpointVerdict(Value):
    """What was proven. Bound to one manifest by its digest, so that a swapped manifest voids the verdict."""

    step: int
    level: Literal["integrity", "replay"]
    valid: bool
    reasons: tuple[str, ...] = ()
    weights_bad: bool = Field(
        default=False, description="The weights themselves are bad (not finite, unchanged): roll back instead of saving again."
    )
    manifest_sha256: str
    weights_digest: str = ""
    duration_s: float = 0.0
    judged_unix_s: float = 0.0


CheckpointState = Literal["valid", "unvalidated", "invalid", "incomplete", "quarantined"]


class CheckpointInfo(Value):
    """One line of a listing. `valid` means a verdict that is bound to the present manifest; files are not hashed for a listing."""

    step: int
    state: CheckpointState
    folder: str
    reasons: tuple[str, ...] = ()
    size_bytes: int = 0
    attempt: int = 0
    weights_digest: str = ""
    created_unix_s: float = 0.0
    pinned: bool = False


class RotationPlan(Value):
    """What rotation keeps, each with why, and what it removes. Steps, ascending."""

    keep: dict[int, tuple[str, ...]] = {}
    remove: tuple[int, ...] = ()


def checkpoint_name(step: int) -> str:
    """Folder name of a step. Names are never compared as text: `parse_checkpoint_name` gives the number."""
    return f"step-{step:09d}"


def parse_checkpoint_name(name: str) -> int | None:
    """The step of a checkpoint folder, or None for anything else."""
    match = _CHECKPOINT_NAME.match(name)
    return int(match.group(1)) if match else None
