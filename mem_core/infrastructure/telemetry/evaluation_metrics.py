"""Figures of held-out rows beside the numbers of steps: `metrics/evaluations.npz`, one row for each set of each evaluation."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mem_core.domain.evaluation import SetFigures
from mem_core.domain.events import Evaluated

FILE_NAME = "evaluations.npz"
_NO_ACCURACY = float("nan")


def figures_of(event: Evaluated) -> dict[str, SetFigures]:
    """The sets of an evaluation; an older one had the held-out rows alone, and its loss alone."""
    if event.sets:
        return event.sets
    rows, total = event.validation_rows or 0, event.validation_rows_total or 0
    return {"validation": SetFigures.of(event.validation_loss, None, tokens=0, rows=rows, rows_total=total)}


def write_evaluation_metrics(folder: Path, evaluations: Sequence[Evaluated]) -> Path:
    """Write every evaluation that counts: whole or not at all. Columns of equal length; `set` is text, never an object.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = [(event.step, name, figures) for event in evaluations for name, figures in figures_of(event).items()]
    accuracies = [figures.token_accuracy for *_, figures in rows]
    columns = {
        "step": np.array([step for step, *_ in rows], np.int64),
        "set": np.array([name for _, name, _ in rows], np.str_),
        "loss": np.array([figures.loss for *_, figures in rows], np.float64),
        "perplexity": np.array([figures.perplexity for *_, figures in rows], np.float64),
        "token_accuracy": np.array([_NO_ACCURACY if share is None else share for share in accuracies], np.float64),
        "rows": np.array([figures.rows for *_, figures in rows], np.int64),
        "rows_total": np.array([figures.rows_total for *_, figures in rows], np.int64),
    }
    folder.mkdir(exist_ok=True)
    temporary = folder / f".writing-{os.getpid()}-{FILE_NAME}"
    try:
        with temporary.open("wb") as file:
            np.savez(file, **columns)  # pyright: ignore[reportArgumentType]
        temporary.replace(folder / FILE_NAME)
    finally:
        temporary.unlink(missing_ok=True)
    return folder / FILE_NAME
