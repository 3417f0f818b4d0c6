"""Per-step numbers: one small numpy file per committed segment, and down-sampling that keeps the spikes."""

import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.errors import InternalError
from mem_core.domain.events import Evaluated
from mem_core.domain.results.evaluation import SetFigures
from mem_core.infrastructure.storage.reading import open_regular, why

Columns = dict[str, NDArray[np.generic]]

METRIC_DTYPES: dict[str, type[np.generic]] = {
    "batch_index": np.int64,
    "step": np.int64,
    "loss": np.float64,
    "grad_norm": np.float64,
    "lr": np.float64,
    "tokens": np.int64,
    "step_s": np.float32,
    "micro_batches": np.int32,
    "peak_bytes": np.int64,
}
OPTIONAL_DTYPES: dict[str, type[np.generic]] = {"added_loss": np.float64}
"""Columns of some runs; zero for segments without them."""
_DTYPES = METRIC_DTYPES | OPTIONAL_DTYPES
EVALUATIONS_NAME = "evaluations.npz"
_NO_ACCURACY = float("nan")
_NAME = re.compile(r"^step-(\d{9,})\.npz$")
_LIMIT_BYTES = 1 << 30
_TEMPORARY_PREFIX = ".writing-"


def write_segment_metrics(folder: Path, to_step: int, columns: Columns) -> Path:
    """Write the columns of one committed segment to `step-XXXXXXXXX.npz`: whole or not at all.

    Every column of METRIC_DTYPES must be there, one-dimensional and of equal length; one row per batch, in order. A batch that
    was skipped carries the step it did not advance. `grad_norm` is NaN where the engine gives none.

    Raises:
        InternalError: a column is missing or of another length.
        OSError: the folder cannot be written.
    """
    arrays = {name: np.asarray(columns[name], dtype=dtype) for name, dtype in _DTYPES.items() if name in columns}
    shapes = {name: array.shape for name, array in arrays.items()}
    if METRIC_DTYPES.keys() - arrays or len(set(shapes.values())) != 1 or any(array.ndim != 1 for array in arrays.values()):
        raise InternalError(
            "metric columns must all be there, one-dimensional and of equal length",
            field="columns",
            value=shapes,
            bound=", ".join(METRIC_DTYPES),
            remedy="Report this as a bug.",
        )
    folder.mkdir(exist_ok=True)
    final = folder / f"step-{to_step:09d}.npz"
    temporary = folder / f"{_TEMPORARY_PREFIX}{os.getpid()}-{final.name}"
    try:
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
    return final


def discard_metrics_after(folder: Path, step: int) -> tuple[str, ...]:
    """Delete the files of segments that end beyond `step`: their work is lost and will be done again. Returns their names."""
    lost = [path for number, path in _metric_files(folder) if number > step]
    for path in lost:
        path.unlink(missing_ok=True)
    return tuple(path.name for path in lost)


def read_metrics(folder: Path, up_to_step: int | None = None) -> Columns:
    """All columns in batch order, rows beyond `up_to_step` left out; empty arrays where there is nothing."""
    return read_metrics_and_notes(folder, up_to_step)[0]


def read_metrics_and_notes(folder: Path, up_to_step: int | None = None) -> tuple[Columns, list[str]]:
    """As `read_metrics`, and notes naming each file that was cut, damaged or foreign and therefore left out.

    Where files overlap (work done again in other segments) the one written last wins. Nothing is ever unpickled.
    """
    parts: list[Columns] = []
    notes: list[str] = []
    for path in sorted((path for _, path in _metric_files(folder)), key=lambda path: (path.lstat().st_mtime_ns, path.name)):
        try:
            parts.append(read_segment_metrics(path))
        except (OSError, ValueError) as exc:
            notes.append(f"{path.name} left out: {type(exc).__name__}: {why(exc)}"[:300])
    met = {name: dtype for name, dtype in _DTYPES.items() if name in METRIC_DTYPES or any(name in part for part in parts)}
    columns: Columns = {
        name: np.concatenate([np.empty(0, dtype), *(part.get(name, np.zeros_like(part["loss"])) for part in parts)])
        for name, dtype in met.items()
    }
    batch_index = columns["batch_index"]
    if batch_index.size and not np.all(np.diff(batch_index.astype(np.int64)) > 0):
        _, last_first = np.unique(batch_index[::-1], return_index=True)
        columns = {name: values[batch_index.size - 1 - last_first] for name, values in columns.items()}
    if up_to_step is not None:
        keep = columns["step"].astype(np.int64) <= up_to_step
        columns = {name: values[keep] for name, values in columns.items()}
    return columns, notes


def _metric_files(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = ((_NAME.match(path.name), path) for path in folder.iterdir())
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def read_segment_metrics(path: Path, limit_bytes: int = _LIMIT_BYTES) -> Columns:
    """The columns of one file, as they were written. Nothing is unpickled.

    Raises:
        OSError: it cannot be opened. ValueError: it holds something else.
    """
    with open_regular(path) as file:
        try:
            columns = _columns_in(file, limit_bytes)
        except Exception as exc:  # a damaged archive makes zipfile, zlib and numpy raise whatever it leads them to
            raise ValueError(f"not a set of columns ({type(exc).__name__}: {exc})") from exc
    shapes = {values.shape for values in columns.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ValueError("columns differ in length")
    return columns


def _columns_in(file: BinaryIO, limit_bytes: int) -> Columns:
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > limit_bytes:
            raise ValueError("it would unpack to more than a segment can have")
    file.seek(0)
    with np.load(file, allow_pickle=False) as stored:
        met = [*METRIC_DTYPES, *(name for name in OPTIONAL_DTYPES if name in stored)]
        return {name: stored[name].astype(_DTYPES[name], casting="same_kind") for name in met}


def spike_indices(values: NDArray[np.floating], max_points: int = 2_000) -> NDArray[np.int64]:
    """Positions of at most `max_points` finite values, in order, among them the lowest and the highest of each bin.

    values: (n,). Non-finite values are never chosen; a drawing names them apart.
    """
    finite = np.isfinite(values)
    if values.size <= max_points:
        return np.flatnonzero(finite).astype(np.int64)
    width = -(-values.size // (max_points // 2))
    num_bins = -(-values.size // width)
    padding = num_bins * width - values.size
    lows = np.pad(np.where(finite, values, np.inf), (0, padding), constant_values=np.inf).reshape(num_bins, width)
    highs = np.pad(np.where(finite, values, -np.inf), (0, padding), constant_values=-np.inf).reshape(num_bins, width)
    starts = np.arange(num_bins) * width
    chosen = np.unique(np.concatenate([starts + lows.argmin(axis=1), starts + highs.argmax(axis=1)]))
    return chosen[finite[chosen]].astype(np.int64)


def smoothing_window(num_values: int) -> int:
    """Over how many steps the pages take means: long enough to tell from the noise of a batch, short beside the run."""
    return max(5, num_values // 150)


def rolling_mean(values: NDArray[np.floating], window: int) -> NDArray[np.float64]:
    """Centred mean over `window` values, shorter at the ends, of the finite ones among them; NaN where there is none. (n,) -> (n,)."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0), dtype=np.float64)])
    counts = np.concatenate([[0], np.cumsum(finite)])
    positions = np.arange(values.size)
    low, high = np.maximum(positions - window // 2, 0), np.minimum(positions + (window + 1) // 2, values.size)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def smoothed(values: NDArray[np.floating], most: int = 600) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Positions of at most `most` values, evenly spread, and the means around them over `smoothing_window`; (n,) -> (k,), (k,).

    Positions around which nothing is finite are left out.
    """
    mean = rolling_mean(values, smoothing_window(values.size))
    kept = np.unique(np.linspace(0, max(values.size - 1, 0), min(values.size, most)).astype(np.int64))
    kept = kept[np.isfinite(mean[kept])] if values.size else kept
    return kept, mean[kept]


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
    temporary = folder / f".writing-{os.getpid()}-{EVALUATIONS_NAME}"
    try:
        with temporary.open("wb") as file:
            np.savez(file, **columns)  # pyright: ignore[reportArgumentType]
        temporary.replace(folder / EVALUATIONS_NAME)
    finally:
        temporary.unlink(missing_ok=True)
    return folder / EVALUATIONS_NAME


def read_evaluation_metrics(folder: Path) -> Columns:
    """The columns that `write_evaluation_metrics` wrote. Nothing is unpickled.

    Raises:
        OSError: the file cannot be opened. ValueError, KeyError: it holds something else.
    """
    with open_regular(folder / EVALUATIONS_NAME) as file, np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in ("step", "set", "loss", "perplexity", "token_accuracy")}
