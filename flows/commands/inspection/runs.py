"""`mem runs`: every run of a store in one table, local or remote. Read-only, no Prefect."""

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from flows.commands.report import run_status
from mem_core.core.run.lease import read_lease
from mem_core.domain.errors import MemError, RequestError
from mem_core.domain.printable import printable
from mem_core.domain.run import RunResult
from mem_core.domain.secrets import holds_credentials
from mem_core.domain.units import Value, format_seconds
from mem_core.infrastructure.machine.store import is_remote, local_path
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.journal_file import attempt_files
from mem_core.infrastructure.storage.opening import open_store
from mem_core.infrastructure.storage.port import ObjectStat
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_regular
from mem_core.runtime.checkpoint_manager.mirror.remote_layout import sort_keys

RESULT_NAME = "result.json"
COLUMNS = ("run", "state", "step", "loss", "validation", "goodput", "faults", "last word", "report")


class RunRow(Value):
    """One run of the list. `state`: completed, interrupted, failed, running, stopped (no ending and nobody drives it), stored (remote
    copies of its checkpoints are all that can be seen from here), unreadable."""

    run_id: str
    state: str
    step: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    goodput: float | None = Field(default=None, description="Productive share of the time in which an attempt lived.")
    faults: int | None = None
    last_word_unix_s: float = 0.0
    report_url: str = ""
    problem: str = ""


def list_runs(store: str, as_json: bool, settings: Settings | None = None) -> int:
    """Print the runs of a store, the one with the newest sign of life first.

    Raises:
        RequestError: there is no such store. StoreUnavailable: it cannot be looked at.
    """
    rows = sorted(rows_of(store, settings), key=lambda row: -row.last_word_unix_s)
    if as_json:
        print(json.dumps([row.model_dump(mode="json") for row in rows]))
        return 0
    if not rows:
        print(f"mem: no runs in {store}", file=sys.stderr)
        return 0
    for line in table(rows, time.time()):
        print(printable(line))
    return 0


def rows_of(store: str, settings: Settings | None = None) -> list[RunRow]:
    """The runs of a local folder or a remote store, in no order."""
    if holds_credentials(store):
        raise RequestError("it carries a user, password or key", field="--store", remedy="Leave them out; keys come from the environment.")
    if is_remote(store):
        settings = settings or Settings.from_environment()
        return remote_rows(open_store(store, settings.storage_options(store)).list(""))
    folder = local_path(store)
    if not folder.is_dir():
        raise RequestError("there is no such store", field="--store", value=store, remedy="Give the folder or URL that holds run folders.")
    return [local_row(path) for path in sorted(folder.iterdir()) if os.path.isdir(path / "journal")]


def local_row(folder: Path) -> RunRow:
    """One run folder; what cannot be read is said in its row and hides no other."""
    try:
        heard_unix_s = max((path.lstat().st_mtime for _, path in attempt_files(folder / "journal")), default=0.0)
        result = _result(folder, heard_unix_s)
    except (MemError, OSError) as exc:
        return RunRow(run_id=folder.name, state="unreadable", problem=str(exc))
    state, lease = str(result.status), read_lease(folder)
    if state == "running" and (lease is None or not lease.holder_alive(time.time())):
        state = "stopped"
    return RunRow(
        run_id=folder.name, state=state, step=result.live.step if result.live else result.applied_steps, loss=result.loss_last,
        validation_loss=result.validation_loss, goodput=result.goodput.fraction, faults=len(result.faults),
        last_word_unix_s=heard_unix_s, report_url=result.report_url,
    )  # fmt: skip


def _result(folder: Path, heard_unix_s: float) -> RunResult:
    """The written result where it is the journal's last word, which spares folding a long journal; else the folded journal."""
    path = folder / RESULT_NAME
    try:
        if path.lstat().st_mtime >= heard_unix_s:
            return RunResult.model_validate_json(read_regular(path, RECORD_LIMIT_BYTES))
    except (OSError, ValidationError):
        pass
    return run_status(folder)


def remote_rows(objects: Iterable[ObjectStat]) -> list[RunRow]:
    """Runs by what their copies in a remote store are called: the newest whole copy of each, and when it was written."""
    by_run: dict[str, list[ObjectStat]] = {}
    for item in objects:
        by_run.setdefault(item.key.split("/", 1)[0], []).append(item)
    rows: list[RunRow] = []
    for run_id, items in by_run.items():
        remote = sort_keys(run_id, items)
        if not remote.complete and not remote.attempts:
            continue  # something else that lies in the bucket
        newest = max((item.modified_unix_s for item in items), default=0.0)
        rows.append(
            RunRow(run_id=run_id, state="stored", step=remote.complete[-1].step if remote.complete else None, last_word_unix_s=newest)
        )
    return rows


def table(rows: list[RunRow], now_unix_s: float) -> list[str]:
    """Lines of plain text, one a run under a heading; columns as wide as what is in them."""
    cells = [COLUMNS, *(cells_of(row, now_unix_s) for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(COLUMNS))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def cells_of(row: RunRow, now_unix_s: float) -> tuple[str, ...]:
    """A run in words, one for each of COLUMNS."""
    return (
        row.run_id,
        row.state,
        "–" if row.step is None else f"{row.step:,}",
        _number(row.loss),
        _number(row.validation_loss),
        "–" if row.goodput is None else f"{row.goodput:.0%}",
        "–" if row.faults is None else f"{row.faults:,}",
        f"{format_seconds(max(0.0, now_unix_s - row.last_word_unix_s))} ago" if row.last_word_unix_s else "–",
        row.report_url or row.problem,
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
