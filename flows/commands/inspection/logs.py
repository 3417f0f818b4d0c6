"""`mem logs`: what a run's journal tells, line by line with times, and on request what its worker processes said. No Prefect."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flows.commands.report import require_run
from mem_core.core.run.lease import read_lease
from mem_core.core.run.story import story_line
from mem_core.domain.errors import StoreUnavailable
from mem_core.domain.events import JournalLine, RunEnded
from mem_core.domain.printable import printable
from mem_core.infrastructure.storage.journal_file import attempt_files
from mem_core.infrastructure.storage.reading import open_regular, why
from mem_core.infrastructure.telemetry.journal_reader import parse_journal_lines, read_journal_lines

LOG_BLOCK_BYTES = 65_536
MOST_LOG_BLOCKS = 64  # lines without an end are no lines
LOOK_EVERY_S = 0.5
MOST_NEW_BYTES = 1 << 24
WORKERS_HINT = "mem: what the worker processes said themselves: mem logs --workers"


def print_logs(run_folder: Path, *, workers: bool, follow: bool, as_json: bool, num_lines: int | None = None) -> int:
    """The run's story on standard output, oldest first; `follow` goes on until the run ends or nobody drives it any more.

    `as_json`: one journal line as an object a line, everything included. `workers`: the last lines of each worker's log instead.

    Raises:
        RequestError: there is no run in that folder.
    """
    if workers:
        return _print_worker_logs(run_folder, num_lines or 50)
    show = _json_of if as_json else story_line
    lines, notes = told(run_folder)
    shown = [text for line in lines if (text := show(line)) is not None]
    for text in shown[-num_lines:] if num_lines else shown:
        print(printable(text), flush=follow)
    for note in notes:
        print(f"mem: left out: {note}", file=sys.stderr)
    if follow and (not lines or not isinstance(lines[-1].event, RunEnded)):
        for line in followed(run_folder, time.sleep, lines[-1].sequence if lines else -1):
            if (text := show(line)) is not None:
                print(printable(text), flush=True)
    elif not as_json and has_worker_words(run_folder):
        print(WORKERS_HINT, file=sys.stderr)
    return 0


def told(run_folder: Path) -> tuple[list[JournalLine], list[str]]:
    """The lines of a run's journal, and notes on what could not be read.

    Raises:
        RequestError: there is no run in that folder. StoreUnavailable: nothing of its journal can be read.
    """
    require_run(run_folder)
    lines, notes = read_journal_lines(run_folder / "journal")
    if not lines and notes:
        raise StoreUnavailable("the journal cannot be read", value=notes[0], remedy="Give this user the right to read it, or restore it.")
    return lines, notes


def _json_of(line: JournalLine) -> str:
    return line.model_dump_json()


def followed(run_folder: Path, sleep: Callable[[float], None], after: int) -> Iterator[JournalLine]:
    """Journal lines behind the one numbered `after` as they come; ends with the run's last word, or when its driver is gone and has
    nothing more to say. The files are read from their beginnings once, so that no line falls between two readings."""
    folder = run_folder / "journal"
    read: dict[Path, int] = {}
    while True:
        lease = read_lease(run_folder)
        alive = lease is not None and lease.holder_alive(time.time())
        for _, path in attempt_files(folder):
            new, read[path] = _whole_lines_from(path, read.get(path, 0))
            for line in parse_journal_lines(new):
                if line.sequence <= after:
                    continue
                yield line
                if isinstance(line.event, RunEnded):
                    return
        if not alive:
            return
        sleep(LOOK_EVERY_S)


def _whole_lines_from(path: Path, start: int) -> tuple[bytes, int]:
    with open_regular(path) as file:
        file.seek(start)
        new = file.read(MOST_NEW_BYTES)
    end = new.rfind(b"\n") + 1
    return new[:end], start + end


def has_worker_words(run_folder: Path) -> bool:
    """Whether any worker of this run wrote anything."""
    return any(path.lstat().st_size > 0 for path in (run_folder / "logs").glob("*.log"))


def _print_worker_logs(run_folder: Path, num_lines: int) -> int:
    lines = 0
    for line in run_logs(run_folder, num_lines):
        print(printable(line))
        lines += 1
    if not lines:
        print("mem: the workers of this run have written nothing; what happened is in `mem logs` and `mem report`", file=sys.stderr)
    return 0


def run_logs(run_folder: Path, num_lines: int = 50) -> Iterator[str]:
    """The last lines of each log of the run, newest log last, each log under its name.

    Raises:
        RequestError: there is no run in that folder.
    """
    require_run(run_folder)
    paths = sorted((run_folder / "logs").glob("*.log"), key=lambda path: (path.lstat().st_mtime_ns, path.name))
    return _log_lines(paths, num_lines)


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
