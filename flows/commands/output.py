"""What every verb shares: where a run lies, and how an ending is said. People read standard error, machines standard output."""

import json
import os
import sys
from pathlib import Path
from typing import Literal

from mem_core.core.run.record import has_record
from mem_core.domain.errors import MemError, RequestError
from mem_core.domain.run import RunResult
from mem_core.infrastructure.storage.reading import local_name

Which = int | Literal["best", "newest"]
"""Of a run's checkpoints: that of a step, the best, or the newest."""


def run_folder(run: str, store: str) -> Path:
    """RUN as a folder: a path if it is one, else a run id under the store."""
    path = Path(local_name(run))
    return path if os.path.isdir(path / "journal") or "/" in run else Path(local_name(store)) / run


def split_run(run: str, store: str, field: str = "RUN") -> tuple[str, Which]:
    """`RUN@1200`, `RUN@best` or `RUN`: the run, and which of its checkpoints. A run whose own path holds an @ is itself.

    Raises:
        RequestError: another word behind the @.
    """
    name, at, which = run.rpartition("@")
    if not at or has_record(run_folder(run, store)):
        return run, "newest"
    if which == "best":
        return name, "best"
    if which.isascii() and which.isdigit():
        return name, int(which)
    raise RequestError("behind the @ stands a step or the word best", field=field, value=run, remedy="Write RUN@1200, RUN@best or RUN.")


def print_result(result: RunResult, as_json: bool) -> None:
    """The ending in words on standard error, as one object on standard output where asked."""
    from mem_core.infrastructure.telemetry.notebook import result_text

    # What went wrong is said last and once; a run that never trained has no table worth reading.
    if result.status == "completed":
        print(result_text(result), file=sys.stderr)
    elif result.applied_steps:
        print(result_text(result.model_copy(update={"message": ""})), file=sys.stderr)
    if as_json:
        print(result.model_dump_json())


def report_error(error: MemError, as_json: bool) -> int:
    """Say what went wrong: one message for people, one object for machines."""
    print(f"mem: {error}", file=sys.stderr)
    if as_json and getattr(error, "result", None) is None:
        status = "interrupted" if error.exit_code == 75 else "failed"
        print(json.dumps({"status": status, "exit_code": error.exit_code, "error": type(error).__name__, "message": str(error)}))
    return error.exit_code
