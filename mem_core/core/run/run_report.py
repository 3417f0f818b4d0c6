"""`write_report`: gathers what the report page shows from a run folder and writes the page. Names what it could not read."""

import os
from pathlib import Path
from typing import Any, cast

from mem_core.core.results.samples import SampleBook
from mem_core.core.run.fold import RunFold
from mem_core.core.run.record import sealed_text
from mem_core.domain.events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointRemoved,
    DoctorReported,
    Evaluated,
    JournalLine,
    MemoryPlanChanged,
    Noted,
    PolicyDecided,
    Resumed,
    RunEnded,
)
from mem_core.infrastructure.storage.reading import parse_json, read_json, why
from mem_core.infrastructure.telemetry.journal_reader import read_journal_lines
from mem_core.infrastructure.telemetry.metrics import read_metrics_and_notes
from mem_core.infrastructure.telemetry.report_page import REPORT_NAME
from mem_core.infrastructure.telemetry.report_page.data import AttemptRow, CheckpointRow, ReportData, Timeline
from mem_core.infrastructure.telemetry.report_page.page import render_report


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the run folder from its journal, metrics and request; whole or not at all. Returns its path.

    Works at any time: during the run, after a crash, with parts missing (the page names them). Imports matplotlib, so a
    long-lived process had better call it at its end.

    Raises:
        OSError: the folder cannot be written.
    """
    page = render_report(load_report_data(run_folder))
    final = run_folder / REPORT_NAME
    temporary = run_folder / f".{REPORT_NAME}.{os.getpid()}"
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
    return final


def load_report_data(run_folder: Path) -> ReportData:
    """Read a run folder. Missing or damaged parts leave gaps and a problem, never an error."""
    lines, problems = read_journal_lines(run_folder / "journal")
    fold = RunFold()
    for line in lines:
        fold.add(line)
    run_file, run_problems = _read_run_file(run_folder / "run.json")
    stored = run_file.get("request", run_file if "training" in run_file else {})
    request = cast("dict[str, Any]", stored) if isinstance(stored, dict) else {}
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
        sealed = sealed_text(path.parent)
        content = parse_json(sealed) if sealed is not None else read_json(path)
    except (OSError, ValueError) as exc:
        return {}, [f"{path.name}: {why(exc)}"]
    if not isinstance(content, dict):
        return {}, [f"{path.name}: not a JSON object"]
    return cast("dict[str, Any]", content), []


def gather_timeline(lines: list[JournalLine]) -> Timeline:
    """The lists behind the report's tables and marks."""
    timeline = Timeline(samples=SampleBook(lines).in_order)
    if lines:
        timeline.first_unix_s, timeline.last_unix_s = lines[0].time_unix_s, lines[-1].time_unix_s
    for line in lines:
        event = line.event
        _note_attempt(timeline.attempts, line)
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


def _note_attempt(rows: list[AttemptRow], line: JournalLine) -> None:
    if not rows or rows[-1].attempt != line.attempt:
        rows.append(AttemptRow(line.attempt, line.time_unix_s, line.time_unix_s))
    rows[-1].last_unix_s = line.time_unix_s
    match line.event:
        case AttemptStarted():
            rows[-1].resumed_step = line.event.resumed_step
        case Resumed():
            rows[-1].resumed_step = line.event.step if rows[-1].resumed_step is None else rows[-1].resumed_step
        case RunEnded():
            rows[-1].ended = line.event.status
        case _:
            pass


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
