"""What the report page is made of: plain values, gathered by `mem_core.core.run.run_report`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import (
    Evaluated,
    MemoryPlanChanged,
    PolicyDecided,
)
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.metrics import Columns, smoothing_window


@dataclass(slots=True)
class CheckpointRow:
    """One checkpoint over its life. `times_saved` is above 1 where it was saved again."""

    step: int
    size_bytes: int = 0
    save_s: float = 0.0
    weights_digest: str = ""
    times_saved: int = 0
    verdict: CheckpointVerdict | None = None
    removed: str = ""


@dataclass(slots=True)
class AttemptRow:
    """One attempt: its first and last line, what it went on from, and how it ended ("" where nothing was said any more)."""

    attempt: int
    began_unix_s: float
    last_unix_s: float
    resumed_step: int | None = None
    ended: str = ""


@dataclass(frozen=True, slots=True)
class SmoothedLoss:
    """The training loss without the noise of one batch: means of the first and of the last `window` steps."""

    first: float
    last: float
    window: int


@dataclass(slots=True)
class Timeline:
    """What the report lists beside the folded result, in journal order."""

    checkpoints: dict[int, CheckpointRow] = field(default_factory=dict[int, CheckpointRow])
    decisions: list[PolicyDecided] = field(default_factory=list[PolicyDecided])
    plan_changes: list[MemoryPlanChanged] = field(default_factory=list[MemoryPlanChanged])
    evaluations: list[Evaluated] = field(default_factory=list[Evaluated])
    samples: tuple[StepSamples, ...] = ()
    notes: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    attempts: list[AttemptRow] = field(default_factory=list[AttemptRow])
    environment: EnvironmentReport | None = None
    first_unix_s: float = 0.0
    last_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything that the page is made of. `problems` names what could not be read."""

    run_folder: Path
    result: RunResult
    timeline: Timeline
    columns: Columns
    request: dict[str, Any]
    facts: dict[str, Any]
    problems: list[str]

    def column(self, name: str) -> NDArray[np.float64]:
        """A metric as float64, (n,)."""
        return self.columns[name].astype(np.float64)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The step of each row, (n,)."""
        return self.columns["step"].astype(np.int64)

    def smoothed_loss(self) -> SmoothedLoss | None:
        """None where no step with a finite loss was recorded."""
        loss = self.column("loss")
        loss = loss[np.isfinite(loss)]
        if not loss.size:
            return None
        window = min(smoothing_window(loss.size), max(1, loss.size // 2))
        return SmoothedLoss(float(loss[:window].mean()), float(loss[-window:].mean()), window)

    @property
    def max_steps(self) -> int | None:
        """Steps asked for, where the stored request tells."""
        return _as_int(_at(self.request, "training", "max_steps"))


def _at(tree: dict[str, Any], *names: str) -> Any:
    node: Any = tree
    for name in names:
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def request_number(request: dict[str, Any], *names: str) -> float | None:
    """A number of the stored request, or None where it is not there or no number."""
    value = _at(request, *names)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
