"""Gathers what the report shows from a run folder: journal, metrics, request. Reads only, and names what it could not read."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mem_core.core.run_fold import RunFold
from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.events import (
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointRemoved,
    DoctorReported,
    Evaluated,
    JournalLine,
    MemoryPlanChanged,
    Noted,
    PolicyDecided,
)
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.journal_reader import read_journal_lines
from mem_core.infrastructure.telemetry.metrics import Columns, read_metrics_and_notes


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
class Timeline:
    """What the report lists beside the folded result, in journal order."""

    checkpoints: dict[int, CheckpointRow] = field(default_factory=dict[int, CheckpointRow])
    decisions: list[PolicyDecided] = field(default_factory=list[PolicyDecided])
    plan_changes: list[MemoryPlanChanged] = field(default_factory=list[MemoryPlanChanged])
    evaluations: list[Evaluated] = field(default_factory=list[Evaluated])
    notes: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    environment: EnvironmentReport | None = None
    first_unix_s: float = 0.0
    last_unix_s: float = 0.0
    num_attempts: int = 0


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

    @property
    def max_steps(self) -> int | None:
        """Steps asked for, where the stored request tells."""
        return _as_int(_at(self.request, "training", "max_steps"))


def load_report_data(run_folder: Path) -> ReportData:
    """Read a run folder. Missing or damaged parts leave gaps and a problem, never an error."""
    lines, problems = read_journal_lines(run_folder / "journal")
    fold = RunFold()
    for line in lines:
        fold.add(line)
    run_file, run_problems = _read_run_file(run_folder / "run.json")
    request = run_file.get("request", run_file if "training" in run_file else {})
    request = request if isinstance(request, dict) else {}
    facts = {name: value for name, value in run_file.items() if name != "request"} if request is not run_file else {}
    run_id = str(request.get("run_id") or run_file.get("run_id") or run_folder.name)
    result = fold.result(run_id=run_id, run_folder=str(run_folder))
    columns, metric_problems = read_metrics_and_notes(run_folder / "metrics", result.applied_steps if lines else None)
    return ReportData(
        run_folder=run_folder,
        result=result,
        timeline=gather_timeline(lines),
        columns=columns,
        request=request,
        facts=facts,
        problems=[*problems, *run_problems, *metric_problems],
    )


def _read_run_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        return {}, [f"{path.name}: {type(exc).__name__}"]
    return (content, []) if isinstance(content, dict) else ({}, [f"{path.name}: not a JSON object"])


def gather_timeline(lines: list[JournalLine]) -> Timeline:
    """The lists behind the report's tables and marks."""
    timeline = Timeline()
    if lines:
        timeline.first_unix_s, timeline.last_unix_s = lines[0].time_unix_s, lines[-1].time_unix_s
        timeline.num_attempts = len({line.attempt for line in lines})
    for line in lines:
        event = line.event
        match event:
            case CheckpointCommitted() | CheckpointJudged() | CheckpointRemoved():
                _note_checkpoint(timeline.checkpoints, event)
            case PolicyDecided():
                timeline.decisions.append(event)
            case MemoryPlanChanged():
                timeline.plan_changes.append(event)
            case Evaluated():
                timeline.evaluations.append(event)
            case DoctorReported():
                timeline.environment = event.report
            case Noted():
                timeline.notes.append((line.time_unix_s, event.text))
            case _:
                pass
    return timeline


def _note_checkpoint(rows: dict[int, CheckpointRow], event: CheckpointCommitted | CheckpointJudged | CheckpointRemoved) -> None:
    step = event.verdict.step if isinstance(event, CheckpointJudged) else event.step
    row = rows.setdefault(step, CheckpointRow(step))
    match event:
        case CheckpointCommitted():
            row.size_bytes, row.save_s, row.weights_digest = event.size_bytes, event.duration_s, event.weights_digest
            row.times_saved, row.verdict, row.removed = row.times_saved + 1, None, ""
        case CheckpointJudged():
            row.verdict = event.verdict
        case CheckpointRemoved():
            row.removed = event.reason


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
