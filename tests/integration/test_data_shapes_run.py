"""The same rows in other shapes are the same run, to the bit; what was recognised stands in its journal."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from mem_core.core.run.run_report import load_report_data
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult

pytestmark = pytest.mark.integration
ROWS = [{"instruction": f"Add {n} and", "input": "1" * (n % 3), "output": f"{n + 1}, since that is the next"} for n in range(60)]


def as_lines(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def as_array(folder: Path) -> Path:
    path = folder / "rows.json.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS, indent=1).encode()))
    return path


def as_columns(folder: Path) -> Path:
    """In several files of a folder."""
    target = folder / "columns"
    target.mkdir()
    for number in range(3):
        pq.write_table(pa.Table.from_pylist(ROWS[20 * number : 20 * number + 20]), target / f"part-{number}.parquet")
    return target


def as_table(folder: Path) -> Path:
    path = folder / "rows.tsv.zst"
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(ROWS[0]), delimiter="\t")
    writer.writeheader()
    writer.writerows(ROWS)
    path.write_bytes(zstandard.compress(text.getvalue().encode()))
    return path


def as_seven(folder: Path) -> Path:
    target = folder / "seven"
    target.mkdir()
    for number in range(7):
        part = ROWS[number * len(ROWS) // 7 : (number + 1) * len(ROWS) // 7]
        (target / f"part-{number}.jl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return target


def as_saved(folder: Path) -> Path:
    """As `datasets.Dataset.save_to_disk` writes it."""
    target = folder / "saved"
    target.mkdir()
    table = pa.Table.from_pylist(ROWS)
    with (target / "data.arrow").open("wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (target / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}], "_indices_files": None}))
    (target / "dataset_info.json").write_text("{}")
    return target


ALL = (as_lines, as_array, as_columns, as_table, as_seven, as_saved)


@pytest.mark.parametrize("shapes", [ALL[:3], pytest.param((as_lines, *ALL[3:]), marks=pytest.mark.slow)], ids=["common", "others"])
def test_a_run_is_the_same_from_every_shape(
    drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest], tmp_path: Path, shapes: tuple[Callable[[Path], Path], ...]
) -> None:
    training = {"max_steps": 12, "segment_steps": 6, "warmup_steps": 2}
    ends: list[tuple[str, str, float | None]] = []
    for number, shape in enumerate(shapes):
        request = nano(f"run-{number}", training=training, data={"train": [str(shape(tmp_path))], "validation": 0.2})
        result = drive(request)
        assert result.status == "completed"
        ends.append((result.weights_digest, result.trajectory_digest, result.validation_loss))
        told = load_report_data(tmp_path / f"run-{number}").result.data
        assert told is not None
        assert told.num_documents == len(ROWS)
        assert any("data.context_field: input" in note for note in told.notes)
    assert len(set(ends)) == 1
