"""`metrics/steps.csv` and `metrics/evaluations.csv`: every step a line, with units in the names of the columns."""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mem_core.domain.events import Evaluated
from mem_core.domain.results.samples import StepSamples
from mem_core.domain.run import RunStatus
from mem_core.infrastructure.storage.reading import open_regular
from mem_core.infrastructure.storage.writing import SHARED, open_append, replace_text
from mem_core.infrastructure.telemetry.metrics import Columns, figures_of, read_metrics

STEPS_NAME, EVALUATIONS_NAME = "steps.csv", "evaluations.csv"
# Column of the table -> column of the metrics.
STEP_COLUMNS = {
    "step": "step", "batch_index": "batch_index", "loss_nats_per_token": "loss", "added_loss_nats_per_token": "added_loss",
    "gradient_norm": "grad_norm", "learning_rate": "lr", "trained_tokens": "tokens", "step_seconds": "step_s",
    "micro_batches": "micro_batches", "peak_memory_bytes": "peak_bytes",
}  # fmt: skip
EVALUATION_COLUMNS = ("step", "set", "loss_nats_per_token", "perplexity", "token_accuracy", "rows", "rows_total")


class CsvLogger:
    """Appends a segment's steps; a step that is done again replaces what stood there, a line that a crash cut goes."""

    name = "csv"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def rewind(self, step: int) -> None:
        """Cut the table behind `step`. A run that had no table gets one of what was recorded so far."""
        path = self._folder / STEPS_NAME
        if os.path.lexists(path):
            _cut(path, step)
        elif self._folder.is_dir():
            self._append(read_metrics(self._folder, step))

    def segment(self, to_step: int, columns: Columns, memory_limit_bytes: int) -> None:
        """A line a step."""
        self._append(columns)

    def evaluations(self, evaluations: Sequence[Evaluated]) -> None:
        """The whole table anew, which is short."""
        self._folder.mkdir(exist_ok=True)
        replace_text(self._folder / EVALUATIONS_NAME, _text([EVALUATION_COLUMNS, *_evaluation_rows(evaluations)]))

    def samples(self, samples: Sequence[StepSamples]) -> None:
        """Texts are no figures."""

    def end(self, status: RunStatus, texts: dict[str, str]) -> str:
        """Nothing is kept back."""
        return ""

    def _append(self, columns: Columns) -> None:
        if columns["step"].size == 0:
            return
        self._folder.mkdir(exist_ok=True)
        series = [columns[name].tolist() if name in columns else [""] * columns["step"].size for name in STEP_COLUMNS.values()]
        rows = [["" if value != value else value for value in row] for row in zip(*series, strict=True)]  # a NaN is no value
        with open_append(self._folder / STEPS_NAME, SHARED) as file:
            header = [tuple(STEP_COLUMNS)] if file.tell() == 0 else []
            file.write(_text([*header, *rows]).encode())


def _cut(path: Path, step: int) -> None:
    """Keep the heading and the whole lines up to `step`."""
    keep_bytes = 0
    with open_regular(path) as file:
        for number, line in enumerate(file):
            first = line.split(b",", 1)[0]
            if not line.endswith(b"\n") or (number and not (first.isdigit() and int(first) <= step)):
                break
            keep_bytes += len(line)
    with open_append(path, SHARED) as file:
        file.truncate(keep_bytes)


def _evaluation_rows(evaluations: Sequence[Evaluated]) -> Iterator[tuple[Any, ...]]:
    for event in evaluations:
        for name, figures in figures_of(event).items():
            accuracy = "" if figures.token_accuracy is None else figures.token_accuracy
            yield event.step, name, figures.loss, figures.perplexity, accuracy, figures.rows, figures.rows_total


def _text(rows: Sequence[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
