"""Metrics files: whole or not at all, read without pickle, overlaps resolved, spikes kept."""

import os
from pathlib import Path

import numpy as np
import pytest

from mem_core.domain.errors import InternalError
from mem_core.infrastructure.telemetry.metrics import (
    METRIC_DTYPES,
    Columns,
    discard_metrics_after,
    read_metrics,
    read_metrics_and_notes,
    rolling_mean,
    spike_indices,
    write_segment_metrics,
)


def columns_of(from_step: int, to_step: int, loss: float = 1.0) -> Columns:
    steps = np.arange(from_step + 1, to_step + 1)
    columns: Columns = {name: np.zeros(steps.size, dtype) for name, dtype in METRIC_DTYPES.items()}
    return {**columns, "step": steps, "batch_index": steps - 1, "loss": np.full(steps.size, loss)}


def test_segments_come_back_in_step_order_with_their_types(tmp_path: Path) -> None:
    write_segment_metrics(tmp_path, 200, columns_of(100, 200))
    write_segment_metrics(tmp_path, 100, columns_of(0, 100))
    columns = read_metrics(tmp_path)
    assert columns["step"].tolist() == list(range(1, 201))
    assert {name: values.dtype for name, values in columns.items()} == {name: np.dtype(dtype) for name, dtype in METRIC_DTYPES.items()}
    assert read_metrics(tmp_path, up_to_step=150)["step"].max() == 150


def test_nothing_written_gives_empty_columns(tmp_path: Path) -> None:
    assert {name: values.size for name, values in read_metrics(tmp_path / "absent").items()} == dict.fromkeys(METRIC_DTYPES, 0)


def test_work_done_again_in_other_segments_wins_over_the_lost_work(tmp_path: Path) -> None:
    for to_step, columns, age_s in ((200, columns_of(100, 200, 9.0), 20), (150, columns_of(100, 150, 1.0), 10)):
        os.utime(write_segment_metrics(tmp_path, to_step, columns), (1_700_000_000 - age_s, 1_700_000_000 - age_s))
    columns = read_metrics(tmp_path)
    assert columns["loss"].tolist() == [1.0] * 50 + [9.0] * 50
    assert discard_metrics_after(tmp_path, 150) == ("step-000000200.npz",)
    assert read_metrics(tmp_path)["step"].max() == 150


def test_cut_and_foreign_files_are_left_out_and_named(tmp_path: Path) -> None:
    whole = write_segment_metrics(tmp_path, 100, columns_of(0, 100))
    (tmp_path / "step-000000200.npz").write_bytes(whole.read_bytes()[:-300])
    np.savez(tmp_path / "step-000000300.npz", hello=np.zeros(3))
    with (tmp_path / "step-000000400.npz").open("wb") as file:
        np.savez(file, **{**columns_of(300, 400), "loss": np.array([{"pickled": 1}], dtype=object)})
    (tmp_path / "step-000000500.npz").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no metrics file at all")
    columns, notes = read_metrics_and_notes(tmp_path)
    assert columns["step"].tolist() == list(range(1, 101))
    assert sorted(note.split()[0] for note in notes) == [f"step-000000{number}.npz" for number in (200, 300, 400, 500)]


def test_a_column_that_is_missing_or_short_is_refused_and_nothing_stays_behind(tmp_path: Path) -> None:
    short = {**columns_of(0, 10), "loss": np.zeros(9)}
    missing = {name: values for name, values in columns_of(0, 10).items() if name != "lr"}
    for columns in (short, missing):
        with pytest.raises(InternalError, match="columns"):
            write_segment_metrics(tmp_path / "metrics", 10, columns)
    assert not (tmp_path / "metrics").exists()


def test_down_sampling_keeps_every_spike_and_stays_small() -> None:
    values = np.sin(np.arange(1_000_000) / 1e5)
    values[[1_234, 777_777]] = (50.0, -50.0)
    values[5] = np.nan
    chosen = spike_indices(values)
    assert chosen.size <= 2_000
    assert {1_234, 777_777} <= set(chosen.tolist())
    assert 5 not in chosen
    assert np.all(np.diff(chosen) > 0)


def test_few_points_are_all_kept_but_those_that_are_no_numbers() -> None:
    assert spike_indices(np.array([1.0, np.nan, 3.0, np.inf])).tolist() == [0, 2]


def test_bins_without_a_finite_value_choose_none() -> None:
    assert spike_indices(np.full(10_000, np.nan), max_points=100).size == 0


def test_the_rolling_mean_is_the_mean_of_the_finite_neighbours() -> None:
    values = np.array([1.0, 2.0, np.nan, 4.0, 9.0])
    assert rolling_mean(values, 3).tolist() == pytest.approx([1.5, 1.5, 3.0, 6.5, 6.5])
    assert np.isnan(rolling_mean(np.array([np.nan, np.nan]), 3)).all()
