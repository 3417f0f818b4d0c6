"""`mem compare`: runs side by side, as text, as JSON, and as one page with overlaid curves. Read-only, no Prefect."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flows.commands.inspection.located import located
from mem_core.core.results.comparison import compare, read_run
from mem_core.domain.errors import RequestError, StoreUnavailable
from mem_core.domain.printable import printable
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.writing import replace_text
from mem_core.infrastructure.telemetry.compare_page.data import Comparison, ReadRun
from mem_core.infrastructure.telemetry.compare_page.page import figure_cells, render_comparison, shown_value, words_of

COLUMNS = ("run", "state", "steps", "loss", "best val", "at step", "last val", "goodput", "faults", "restarts", "time", "tokens/s")
_WIDEST = 40


def compare_runs(runs: Sequence[str], store: str, output: Path | None, as_json: bool, settings: Settings | None = None) -> int:
    """Print the comparison; write the page where one is asked for.

    Raises:
        RequestError: fewer than two runs, or one of them is not there. StoreUnavailable: a store does not answer, or the page cannot be
            written.
    """
    if len(runs) < 2:
        raise RequestError("there is nothing to compare it with", field="RUN", value=", ".join(runs), remedy="Name two runs or more.")
    settings = settings or Settings.from_environment()
    read = [_read(run, store, settings) for run in runs]
    comparison = compare(read)
    for line in text_of(comparison):
        print(printable(line), file=sys.stderr)
    if output is not None:
        _write(output, render_comparison(comparison, [run.curves for run in read]))
        print(f"curves: {output.absolute().as_uri()}", file=sys.stderr)
    if as_json:
        print(comparison.model_dump_json())
    return 0


def text_of(comparison: Comparison) -> Iterator[str]:
    """The comparison as lines of plain text."""
    yield from _table([COLUMNS, *((run.name, *map(str, figure_cells(run))) for run in comparison.runs)])
    for run in comparison.runs:
        if run.forked_from:
            yield f"{run.name}: {run.forked_from}"
    yield ""
    for row in comparison.digests:
        yield words_of(row, comparison.runs[0].name)
    yield ""
    if not comparison.settings:
        yield "No setting differs."
        return
    yield "Settings that differ:"
    rows = [(row.field, *(_cut(shown_value(value)) for value in row.values)) for row in comparison.settings]
    yield from _table([("field", *(run.name for run in comparison.runs)), *rows])


def _read(run: str, store: str, settings: Settings) -> ReadRun:
    with located(run, store, settings) as (folder, place):
        return read_run(folder, place)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _table(cells: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[index]) for line in cells) for index in range(len(cells[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _write(path: Path, page: str) -> None:
    try:
        replace_text(path, page)
    except OSError as exc:
        remedy = "Name a file in a folder that is there and can be written."
        raise StoreUnavailable(
            "the page cannot be written", field="--output", value=f"{path}: {exc.strerror or exc}", remedy=remedy
        ) from exc
