"""What stands behind `mem status`, `mem report` and `mem logs`: plain functions on a run folder, no Prefect."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mem_core.core.run.fold import RunFold
from mem_core.core.run.run_report import write_report
from mem_core.domain.errors import RequestError, StoreUnavailable
from mem_core.domain.run import RunResult
from mem_core.domain.units import format_seconds
from mem_core.infrastructure.storage.journal_file import attempt_files, probe_attempt
from mem_core.infrastructure.storage.reading import open_regular, why
from mem_core.infrastructure.telemetry.journal_reader import read_journal_lines
from mem_core.infrastructure.telemetry.notebook import result_text
from mem_core.infrastructure.telemetry.report import REPORT_NAME

LOG_BLOCK_BYTES = 65_536
MOST_LOG_BLOCKS = 64  # lines without an end are no lines
MOST_NOTES = 5


def run_status(run_folder: Path) -> RunResult:
    """How a run stands, folded from its journal. `status --json` prints `model_dump_json()` of it.

    Raises:
        RequestError: there is no run in that folder. StoreUnavailable: its journal cannot be read.
    """
    return _fold(run_folder)[0]


def run_status_text(run_folder: Path, now_unix_s: float | None = None) -> str:
    """How a run stands, for people; a run without an end says how old its last sign of life is.

    Raises:
        RequestError: there is no run in that folder. StoreUnavailable: its journal cannot be read.
    """
    result, last_unix_s, notes = _fold(run_folder)
    text = result_text(result) + "".join(f"\n  left out  {note}" for note in notes[:MOST_NOTES])
    if result.status != "running" or last_unix_s is None:
        return text
    age_s = max(0.0, (time.time() if now_unix_s is None else now_unix_s) - last_unix_s)
    return f"{text}\n  last sign of life  {format_seconds(age_s)} ago (if nothing runs any more, the same command goes on from there)"


def run_report(run_folder: Path) -> Path:
    """Write the report page and return its path.

    Raises:
        RequestError: there is no run in that folder.
        StoreUnavailable: the page cannot be written.
    """
    _require_run(run_folder)
    try:
        return write_report(run_folder)
    except OSError as exc:
        remedy = f"Free space or make {run_folder} writable, then run mem report again."
        raise StoreUnavailable("the report cannot be written", field=str(run_folder), value=exc.strerror, remedy=remedy) from exc


def run_logs(run_folder: Path, num_lines: int = 50) -> Iterator[str]:
    """The last lines of each log of the run, newest log last, each log under its name.

    Raises:
        RequestError: there is no run in that folder.
    """
    _require_run(run_folder)
    paths = sorted((run_folder / "logs").glob("*.log"), key=lambda path: (path.lstat().st_mtime_ns, path.name))
    return _log_lines(paths, num_lines)


def print_logs(run_folder: Path) -> int:
    """`mem logs`: the lines on standard output; a run whose workers had nothing to say is told so on standard error."""
    lines = 0
    for line in run_logs(run_folder):
        print(line)
        lines += 1
    if not lines:
        print("mem: the workers of this run have written nothing; what happened is in `mem status` and `mem report`", file=sys.stderr)
    return 0


def _log_lines(paths: list[Path], num_lines: int) -> Iterator[str]:
    for path in paths:
        yield f"==> {path.name} <=="
        try:
            yield from tail(path, num_lines)
        except OSError as exc:
            yield f"({why(exc)})"


def tail(path: Path, num_lines: int) -> list[str]:
    """The last lines of a file, without reading the rest of it. What is not UTF-8 is shown as replacement characters."""
    blocks: list[bytes] = []
    num_newlines = 0
    with open_regular(path) as file:
        position = file.seek(0, 2)
        while position > 0 and num_newlines <= num_lines and len(blocks) < MOST_LOG_BLOCKS:
            size_bytes = min(LOG_BLOCK_BYTES, position)
            position -= size_bytes
            file.seek(position)
            blocks.append(file.read(size_bytes))
            num_newlines += blocks[-1].count(b"\n")
    text = b"".join(reversed(blocks)).decode("utf-8", "replace")
    lines = text.split("\n")
    return (lines[:-1] if lines[-1] == "" else lines)[-num_lines:] if num_lines > 0 else []


def _fold(run_folder: Path) -> tuple[RunResult, float | None, list[str]]:
    """The result, when the run last gave a sign of life, and what of the journal was left out."""
    _require_run(run_folder)
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


def _require_run(run_folder: Path) -> None:
    if not os.path.isdir(run_folder / "journal"):
        remedy = "Give a run id together with --store, or the path of a run folder; mem train starts a run."
        raise RequestError("there is no run here", field="RUN", value=run_folder, bound="a folder with a journal", remedy=remedy)
