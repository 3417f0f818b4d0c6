"""What stands behind `mem status` and `mem report`: plain functions on a run folder, no Prefect."""

import os
import time
from pathlib import Path

from mem_core.core.run.fold import RunFold
from mem_core.core.run.lease import read_lease
from mem_core.core.run.run_report import write_report
from mem_core.domain.errors import RequestError, StoreUnavailable
from mem_core.domain.run import LiveStep, RunResult
from mem_core.domain.units import format_seconds
from mem_core.infrastructure.storage.journal_file import attempt_files, probe_attempt
from mem_core.infrastructure.storage.reading import why
from mem_core.infrastructure.telemetry.journal_reader import read_journal_lines
from mem_core.infrastructure.telemetry.live import read_live
from mem_core.infrastructure.telemetry.notebook import result_text
from mem_core.infrastructure.telemetry.report_page import REPORT_NAME

MOST_NOTES = 5


def run_status(run_folder: Path) -> RunResult:
    """How a run stands, folded from its journal. `status --json` prints `model_dump_json()` of it.

    Raises:
        RequestError: there is no run in that folder. StoreUnavailable: its journal cannot be read.
    """
    result, _, _ = _fold(run_folder)
    return result.model_copy(update={"live": _live(run_folder)}) if result.status == "running" else result


def run_status_text(run_folder: Path, now_unix_s: float | None = None) -> str:
    """How a run stands, for people; a run without an end says how old its last sign of life is.

    Raises:
        RequestError: there is no run in that folder. StoreUnavailable: its journal cannot be read.
    """
    result, last_unix_s, notes = _fold(run_folder)
    text = result_text(result) + "".join(f"\n  left out  {note}" for note in notes[:MOST_NOTES])
    if result.status != "running" or last_unix_s is None:
        return text
    now_unix_s = time.time() if now_unix_s is None else now_unix_s
    live = _live(run_folder)
    if live is not None:
        return f"{text}\n  now                {live_words(live, now_unix_s)}"
    age_s = max(0.0, now_unix_s - last_unix_s)
    return f"{text}\n  last sign of life  {format_seconds(age_s)} ago (if nothing runs any more, the same command goes on from there)"


def live_words(live: LiveStep, now_unix_s: float) -> str:
    """`step 1,432 of 10,000 in segment 1 (until 2,000), 214 steps/s, 38 s left, loss 3.2101 (1.0 s ago)`."""
    parts = (
        f"step {live.step:,} of {live.total_steps:,} in segment {live.segment_index} (until {live.until_step:,})",
        f"{live.steps_per_s:,.3g} steps/s" if live.steps_per_s is not None else "",
        f"{format_seconds(live.left_s)} left" if live.left_s is not None else "",
        f"loss {live.loss:.4f}" if live.loss is not None else live.phase,
    )
    return f"{', '.join(part for part in parts if part)} ({format_seconds(max(0.0, now_unix_s - live.time_unix_s))} ago)"


def _live(run_folder: Path) -> LiveStep | None:
    """Where the run is right now; None where its holder has gone or is not stepping."""
    live, lease = read_live(run_folder), read_lease(run_folder)
    if live is None or lease is None or live.attempt != lease.attempt or not lease.holder_alive(time.time()):
        return None
    return live


def run_report(run_folder: Path) -> Path:
    """Write the report page and return its path.

    Raises:
        RequestError: there is no run in that folder.
        StoreUnavailable: the page cannot be written.
    """
    require_run(run_folder)
    try:
        return write_report(run_folder)
    except OSError as exc:
        remedy = f"Free space or make {run_folder} writable, then run mem report again."
        raise StoreUnavailable("the report cannot be written", field=str(run_folder), value=exc.strerror, remedy=remedy) from exc


def _fold(run_folder: Path) -> tuple[RunResult, float | None, list[str]]:
    """The result, when the run last gave a sign of life, and what of the journal was left out."""
    require_run(run_folder)
    attempts = _readable_attempts(run_folder)
    lines, notes = read_journal_lines(run_folder / "journal")
    fold = RunFold()
    for line in lines:
        fold.add(line)
    report = run_folder / REPORT_NAME
    report_url = report.resolve().as_uri() if os.path.isfile(report) else ""
    result = fold.result(run_id=run_folder.resolve().name, run_folder=str(run_folder), report_url=report_url)
    began_unix_s = attempts[-1].stat().st_mtime if attempts else None  # killed before its first line
    return result, lines[-1].time_unix_s if lines else began_unix_s, notes


def _readable_attempts(run_folder: Path) -> list[Path]:
    """The journal's files. A run of which a part cannot be read is not told as if that part had never been.

    Raises:
        StoreUnavailable: one cannot be read.
    """
    try:
        paths = [path for _, path in attempt_files(run_folder / "journal")]
        for path in paths:
            probe_attempt(path)
    except OSError as exc:
        remedy = "Give this user the right to read it, or restore the file."
        raise StoreUnavailable("the journal cannot be read", value=f"{exc.filename}: {why(exc)}", remedy=remedy) from exc
    return paths


def require_run(run_folder: Path) -> None:
    """Raises RequestError where there is no run."""
    if not os.path.isdir(run_folder / "journal"):
        remedy = "Give a run id together with --store, or the path of a run folder; mem train starts a run."
        raise RequestError("there is no run here", field="RUN", value=run_folder, bound="a folder with a journal", remedy=remedy)
