"""Steps as they were recorded against the same steps done again: every number to the bit, and how far apart the losses are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mem_core.domain.results.audit import AuditDistances
from mem_core.infrastructure.telemetry.metrics import Columns

MOST_NAMED = 3
# What a step is, by the name of its column. How long it took and what memory it needed are the machine's.
NAMES = {
    "step": "applied steps after batch",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens": "trained tokens",
    "micro_batches": "number of micro-batches",
    "added_loss": "added loss",
}


@dataclass(frozen=True)
class StepComparison:
    """`num_steps` with recorded numbers, reasons where any is another one, distances of what both have."""

    num_steps: int
    reasons: tuple[str, ...]
    distance: AuditDistances


def compare_steps(recorded: Columns, redone: Columns, committed: Mapping[int, float]) -> StepComparison:
    """`recorded` may lack steps, and hold others. `committed`: step -> loss as the journal itself names it.

    Compared to the bit; a number that is missing on both sides (NaN) is the same.
    """
    ours, theirs = _same_batches(recorded, redone)
    reasons: list[str] = []
    for name, words in NAMES.items():
        if name in recorded and name in redone:
            reasons += _differences(words, recorded[name][ours], redone[name][theirs], redone["step"][theirs])
    reasons += _against_the_journal(redone, committed)
    distance = AuditDistances(
        loss=_furthest(recorded["loss"][ours], redone["loss"][theirs]),
        grad_norm=_furthest(recorded["grad_norm"][ours], redone["grad_norm"][theirs]),
    )
    return StepComparison(len(ours), tuple(reasons), distance)


def _same_batches(recorded: Columns, redone: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers on both sides of the batches that both have."""
    _, ours, theirs = np.intersect1d(recorded["batch_index"], redone["batch_index"], return_indices=True)
    return ours, theirs


def _differences(words: str, old: np.ndarray, new: np.ndarray, steps: np.ndarray) -> list[str]:
    both_missing = np.isnan(old.astype(np.float64)) & np.isnan(new.astype(np.float64))
    found = np.flatnonzero((old != new) & ~both_missing)
    named = [f"{words} of step {int(steps[at])} is {_shown(new[at])}, recorded {_shown(old[at])}" for at in found[:MOST_NAMED]]
    return [*named, *([f"{words} of {len(found) - MOST_NAMED} more steps"] if len(found) > MOST_NAMED else [])]


def _against_the_journal(redone: Columns, committed: Mapping[int, float]) -> list[str]:
    steps, losses = redone["step"].astype(np.int64), redone["loss"]
    reasons: list[str] = []
    for step, said in sorted(committed.items()):
        rows = np.flatnonzero(steps == step)
        if rows.size and float(losses[rows[-1]]) != said:
            reasons.append(f"loss of step {step} is {_shown(losses[rows[-1]])}, the journal says {_shown(said)}")
    return reasons


def _furthest(old: np.ndarray, new: np.ndarray) -> float | None:
    """Largest relative difference of numbers that both have; None where there are none."""
    known = np.isfinite(old.astype(np.float64)) & np.isfinite(new.astype(np.float64))
    if not known.any():
        return None
    before, after = old[known].astype(np.float64), new[known].astype(np.float64)
    return float(np.max(np.abs(after - before) / np.maximum(np.abs(before), np.finfo(np.float64).tiny)))


def _shown(value: Any) -> str:
    return repr(float(value))
