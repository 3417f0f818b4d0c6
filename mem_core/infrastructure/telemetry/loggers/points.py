"""The points that are sent to a server: read from the run's own files, thinned, in the order of their steps. So nothing waits in memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mem_core.infrastructure.telemetry.metrics import Columns, read_evaluation_metrics, read_segment_metrics
from mem_core.infrastructure.telemetry.tensorboard import kept_rows, scalar_series

ROWS_THINNED_TOGETHER = 1_000
_NAME = re.compile(r"^step-(\d{9,})\.npz$")


@dataclass(frozen=True)
class Point:
    """Values of one step by their names."""

    step: int
    values: dict[str, float]


def points_of_steps(folder: Path, beyond: int, memory_limit_bytes: int) -> Iterator[tuple[int, list[Point]]]:
    """(last step, points) of each file of steps beyond `beyond`, thinned as TensorBoard's are. A file that went meanwhile is passed over.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    matches = [(match, path) for path in folder.iterdir() if (match := _NAME.match(path.name))] if folder.is_dir() else []
    for to_step, path in sorted((int(match.group(1)), path) for match, path in matches):
        if to_step <= beyond:
            continue
        try:
            columns = read_segment_metrics(path)
        except FileNotFoundError:
            continue
        yield to_step, list(_thinned(columns, beyond, memory_limit_bytes))


def _thinned(columns: Columns, beyond: int, memory_limit_bytes: int) -> Iterator[Point]:
    new = columns["step"].astype(np.int64) > beyond
    columns = {name: values[new] for name, values in columns.items()}
    for start in range(0, columns["step"].size, ROWS_THINNED_TOGETHER):
        part = {name: values[start : start + ROWS_THINNED_TOGETHER] for name, values in columns.items()}
        series = scalar_series(part, memory_limit_bytes)
        for row in kept_rows(part):
            values = {name: float(numbers[row]) for name, numbers in series.items()}
            yield Point(int(part["step"][row]), {name: value for name, value in values.items() if np.isfinite(value)})


def points_of_evaluations(folder: Path, beyond: int) -> list[Point]:
    """A point for each evaluation after step `beyond`, ascending.

    Raises:
        OSError, ValueError: the file cannot be read. One that is not there has none.
    """
    try:
        columns = read_evaluation_metrics(folder)
    except FileNotFoundError:
        return []
    found: dict[int, dict[str, float]] = {}
    for row, step in enumerate(columns["step"].tolist()):
        for name in ("loss", "perplexity", "token_accuracy"):
            value = float(columns[name][row])
            if step > beyond and np.isfinite(value):
                found.setdefault(step, {})[f"evaluation/{columns['set'][row]}/{name}"] = value
    return [Point(step, found[step]) for step in sorted(found)]
