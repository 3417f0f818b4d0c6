"""What the doctor saw. Severity decides: a `failure` stops the run before any training, with its remedy."""

from typing import Literal

from pydantic import Field

from mem_core.domain.units import Value

Severity = Literal["ok", "notice", "warning", "failure"]


class Finding(Value):
    """One check: what was observed, what is needed, and what to do about it.

    `exit_code` says which ending a failure leads to (DESIGN §9); it is 0 for everything milder.
    """

    check: str
    severity: Severity
    observed: str
    needed: str = ""
    remedy: str = ""
    exit_code: int = 0


class MemoryBudget(Value):
    """How many bytes a run may use on one kind of memory, and which limit binds."""

    kind: Literal["host", "device"]
    budget_bytes: int
    binding_limit: str
    limits_bytes: dict[str, int] = Field({}, description="Every limit seen, by name.")


class EnvironmentReport(Value):
    """The machine as one run sees it."""

    device: Literal["cpu", "cuda"]
    device_reason: str
    dtype: Literal["float32", "bfloat16", "float16"]
    num_cores: int
    threads_per_rank: int
    versions: dict[str, str]
    memory: tuple[MemoryBudget, ...]
    estimates_bytes: dict[str, int] = Field({}, description="Predicted sizes: parameters, training peak, checkpoint, ...")
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Findings that stop the run."""
        return tuple(finding for finding in self.findings if finding.severity == "failure")
