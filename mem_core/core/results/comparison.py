"""Runs side by side: where their settings differ, what they came to, and how long they were the same run. Reads run folders, changes none.

A run of 1,000,000 steps is read once and thinned at once, so that as many runs may be compared as somebody likes to look at.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from mem_core.core.run.run_report import load_report_data
from mem_core.domain.events import SegmentEnded
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted
from mem_core.infrastructure.telemetry.compare_page.data import (
    OTHER,
    SAME,
    UNKNOWN,
    Comparison,
    Curve,
    DigestRow,
    ReadRun,
    RunCurves,
    RunFigures,
    SettingRow,
)
from mem_core.infrastructure.telemetry.journal_reader import read_journal_lines
from mem_core.infrastructure.telemetry.metrics import figures_of, smoothed, spike_indices
from mem_core.infrastructure.telemetry.report_page.data import ReportData

FEW_STEPS = 60  # a mean says nothing more than the steps themselves
MOST_POINTS = 600
_FACTS = ("device", "dtype", "data_fingerprint", "model_fingerprint", "threads_per_rank", "versions")
_NAMES = ("run_id", "schema_version")


def read_run(folder: Path, place: str) -> ReadRun:
    """One run folder; what of it cannot be read leaves gaps and a problem, never an error. `place`: where it lies, for people."""
    data = load_report_data(folder)
    evaluated: dict[str, dict[int, float]] = {}
    for event in data.timeline.evaluations:
        for name, found in figures_of(event).items():
            evaluated.setdefault(name, {})[event.step] = found.loss
    first = next(iter(evaluated.values()), dict[int, float]())
    best = min(first, key=lambda step: first[step], default=None)
    saved = {step: row.weights_digest for step, row in data.timeline.checkpoints.items() if row.weights_digest}
    if data.result.weights_digest:
        saved[data.result.applied_steps] = data.result.weights_digest
    return ReadRun(
        place=place,
        result=data.result,
        settings=flat(data.request) | flat({name: data.facts[name] for name in _FACTS if name in data.facts}),
        max_steps=data.max_steps,
        curves=_curves(data, folder, evaluated),
        best_validation=(best, first[best]) if best is not None else None,
        weights_at=saved,
        problems=tuple(data.problems),
    )


def compare(runs: Sequence[ReadRun]) -> Comparison:
    """Everything but the curves. The first run is what the digests of the others are held against."""
    names = unique_names([run.result.run_id for run in runs])
    return Comparison(
        runs=tuple(_figures(run, name) for run, name in zip(runs, names, strict=True)),
        settings=differing([run.settings for run in runs]),
        digests=tuple(_digests(runs[0], run, name) for run, name in zip(runs[1:], names[1:], strict=True)),
    )


def differing(settings: Sequence[dict[str, Any]]) -> tuple[SettingRow, ...]:
    """The fields in which not all agree, in the order of their names; a run's own name is none of them."""
    fields = sorted({name for each in settings for name in each} - set(_NAMES))
    rows = [SettingRow(field=name, values=tuple(each.get(name) for each in settings)) for name in fields]
    return tuple(row for row in rows if any(value != row.values[0] for value in row.values[1:]))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"training": {"seed": 0}}` -> `{"training.seed": 0}`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def unique_names(run_ids: Sequence[str]) -> list[str]:
    """Run ids of different stores may be the same: the second is `demo (2)`."""
    names: list[str] = []
    for number, run_id in enumerate(run_ids):
        before = run_ids[:number].count(run_id)
        names.append(f"{run_id} ({before + 1})" if before else run_id)
    return names


def agreement(first: ReadRun, other: ReadRun) -> tuple[int | None, int | None]:
    """(newest step at which both saved the same weights, first step at which they did not), over the steps that both saved."""
    common = sorted(first.weights_at.keys() & other.weights_at.keys())
    same = [step for step in common if first.weights_at[step] == other.weights_at[step]]
    differ = [step for step in common if first.weights_at[step] != other.weights_at[step]]
    return (same[-1] if same else None), (differ[0] if differ else None)


def _digests(first: ReadRun, other: ReadRun, name: str) -> DigestRow:
    ours, theirs = first.result, other.result
    same_until, other_from = agreement(first, other)
    return DigestRow(
        name=name,
        trajectory=_held(ours.trajectory_digest, theirs.trajectory_digest),
        weights=_held(ours.weights_digest, theirs.weights_digest),
        same_until=same_until,
        other_from=other_from,
    )


def _held(ours: str, theirs: str) -> str:
    return UNKNOWN if not ours or not theirs else SAME if ours == theirs else OTHER


def _figures(run: ReadRun, name: str) -> RunFigures:
    result, best = run.result, run.best_validation
    return RunFigures(
        name=name, place=run.place, status=result.status, steps=result.applied_steps, max_steps=run.max_steps,
        loss=float(run.curves.loss.values[-1]) if run.curves.loss.values.size else result.loss_last,
        best_validation=best[1] if best else None, best_validation_step=best[0] if best else None, validation=result.validation_loss,
        goodput=result.goodput.fraction, faults=len(result.faults), restarts=result.restarts, time_s=result.goodput.lived_s,
        tokens=result.tokens, tokens_per_s=result.tokens_per_s, forked_from=result.forked_from.words() if result.forked_from else "",
        trajectory_digest=result.trajectory_digest, weights_digest=result.weights_digest, problems=run.problems,
    )  # fmt: skip


def _curves(data: ReportData, folder: Path, evaluated: dict[str, dict[int, float]]) -> RunCurves:
    steps, loss, rate = data.steps, data.column("loss"), data.column("lr")
    validation = tuple(
        Curve(np.array(sorted(losses), np.int64), np.array([losses[step] for step in sorted(losses)], np.float64), name)
        for name, losses in evaluated.items()
    )
    if not steps.size:
        return RunCurves(data.result.run_id, _by_segment(folder), Curve(steps, rate), validation, by_segment=True)
    kept, values = smoothed(loss, MOST_POINTS) if loss.size >= FEW_STEPS else _finite(loss)
    thin = spike_indices(rate, MOST_POINTS)
    return RunCurves(data.result.run_id, Curve(steps[kept], values), Curve(steps[thin], rate[thin]), validation)


def _finite(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = spike_indices(values)
    return kept, values[kept]


def _by_segment(folder: Path) -> Curve:
    """The last loss of each segment that counts: all that a remote store holds of the steps."""
    last: dict[int, float] = {}
    for line in read_journal_lines(folder / "journal")[0]:
        outcome = line.event.outcome if isinstance(line.event, SegmentEnded) else None
        if isinstance(outcome, SegmentCompleted | SegmentInterrupted) and outcome.loss_last is not None:
            last = {step: loss for step, loss in last.items() if step < outcome.to_step} | {outcome.to_step: outcome.loss_last}
    values = np.array(list(last.values()), np.float64)
    finite = np.isfinite(values)
    return Curve(np.array(list(last), np.int64)[finite], values[finite])
