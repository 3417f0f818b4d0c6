"""What runs are compared by: plain values, gathered by `mem_core.core.results.comparison`."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.run import RunResult
from mem_core.domain.units import Value

SAME, OTHER, UNKNOWN = "the same", "other", "not known"


class SettingRow(Value):
    """A field in which the runs differ, with the value of each, in the order of the runs; None where a run has no such field."""

    field: str
    values: tuple[Any, ...]


class RunFigures(Value):
    """One run in figures. `name`: its run id, made unique among those that are compared."""

    name: str
    place: str
    status: str
    steps: int
    max_steps: int | None = None
    loss: float | None = None
    best_validation: float | None = None
    best_validation_step: int | None = None
    validation: float | None = None
    goodput: float = 0.0
    faults: int = 0
    restarts: int = 0
    time_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    forked_from: str = ""
    trajectory_digest: str = ""
    weights_digest: str = ""
    problems: tuple[str, ...] = ()


class DigestRow(Value):
    """A run held against the first one. `weights` and `trajectory`: the same, other, or not known at its last step; `same_until`: the
    newest step at which both saved the same weights; `other_from`: the first at which they did not."""

    name: str
    trajectory: str
    weights: str
    same_until: int | None = None
    other_from: int | None = None


class Comparison(Value):
    """Runs side by side. The JSON of `mem compare --json`."""

    runs: tuple[RunFigures, ...]
    settings: tuple[SettingRow, ...]
    digests: tuple[DigestRow, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps, (n,) each, already thinned. `label`: of a set of held-out rows, empty otherwise."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    label: str = ""


@dataclass(frozen=True, slots=True)
class RunCurves:
    """The curves of one run. `by_segment`: no steps were recorded where it was read, a point is the last loss of a segment."""

    name: str
    loss: Curve
    learning_rate: Curve
    validation: tuple[Curve, ...] = ()
    by_segment: bool = False


@dataclass(frozen=True, slots=True)
class ReadRun:
    """A run as it was read: what is compared is made from it. `weights_at`: step -> digest of each save."""

    place: str
    result: RunResult
    settings: dict[str, Any]
    max_steps: int | None
    curves: RunCurves
    best_validation: tuple[int, float] | None = None
    weights_at: dict[int, str] = field(default_factory=dict[int, str])
    problems: tuple[str, ...] = ()
