"""A run over weighted sources: the same bits in one piece or several, on one rank or two; its epochs, its report, its refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.telemetry.metrics import read_metrics

pytestmark = pytest.mark.integration
Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """20 rows and 12 rows, one a document."""
    paths = []
    for name, count in (("a", 20), ("b", 12)):
        rows = [json.dumps({"text": f"{name}{number:>3} " + "abcdefgh" * 3}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
        paths.append(str(tmp_path / f"{name}.jsonl"))
    return paths


def data_of(train: list[Any], **settings: Any) -> dict[str, Any]:
    return {"train": train, "validation": None, "sequence_length": 32, "packing": False, **settings}


def digests(result: RunResult) -> tuple[str | None, str | None]:
    return result.trajectory_digest, result.weights_digest


def test_weights_make_the_epoch_and_pieces_are_the_whole_to_the_bit(drive: Drive, nano: Nano, sources: list[str], tmp_path: Path) -> None:
    """20 rows twice and a half of 12 are 46 rows: 2 epochs in batches of 4 are 23 steps. The pieces end in the middle of both epochs."""
    a, b = sources
    data = data_of([{"path": a, "weight": 2}, {"path": b, "weight": 0.5}])
    training = {"segment_steps": 5, "global_batch_size": 4, "schedule_steps": 23}
    straight = drive(nano("straight", data=data, training={**training, "epochs": 2}))
    drive(nano("pieces", data=data, training={**training, "max_steps": 7}))
    drive(nano("pieces", data=data, training={**training, "max_steps": 15}))
    pieces = drive(nano("pieces", data=data, training={**training, "epochs": 2}))
    assert (straight.applied_steps, straight.epochs) == (23, 2.0)
    assert digests(pieces) == digests(straight)
    assert straight.data is not None
    assert [(source.num_rows, source.epoch_rows) for source in straight.data.sources] == [(20, 40), (12, 6)]
    assert straight.data.steps_per_epoch == 46 / 4
    page = (Path(straight.run_folder) / "report.html").read_text()
    assert "What an epoch is made of" in page
    with pytest.raises(RequestError, match=r"data\.train: run pieces was born with") as caught:
        drive(nano("pieces", data=data_of([{"path": a, "weight": 3}, {"path": b, "weight": 0.5}]), training={**training, "epochs": 2}))
    assert "new run_id" in caught.value.remedy


def test_weights_of_one_are_the_run_without_weights(drive: Drive, nano: Nano, sources: list[str]) -> None:
    a, b = sources
    training = {"max_steps": 6, "segment_steps": 6, "global_batch_size": 4}
    plain = drive(nano("plain", data=data_of([a, b]), training=training))
    ones = drive(nano("ones", data=data_of([{"path": a, "weight": 1}, {"path": b, "weight": 1.0}]), training=training))
    twice = drive(nano("twice", data=data_of([{"path": a, "weight": 2}, b]), training=training))
    assert digests(ones) == digests(plain)
    assert digests(twice) != digests(plain)


def test_two_ranks_see_the_rows_of_one(drive: Drive, nano: Nano, sources: list[str]) -> None:
    """Rows of different lengths, so that the tokens of a step name its rows: every step has the same on one rank and on two."""
    a, b = sources
    for number, path in enumerate(sources):
        rows = [json.dumps({"text": "x" * (3 + (7 * row + 3 * number) % 27)}) for row in range(20)]
        Path(path).write_text("\n".join(rows) + "\n")
    data = data_of([{"path": a, "weight": 1.5}, {"path": b, "weight": 0.3}])
    training = {"max_steps": 12, "segment_steps": 12, "global_batch_size": 4}
    columns = []
    for ranks in (1, 2):
        result = drive(nano(f"ranks-{ranks}", data=data, training=training, parallel={"num_ranks": ranks}))
        columns.append(read_metrics(Path(result.run_folder) / "metrics"))
    one, two = columns
    np.testing.assert_array_equal(one["tokens"], two["tokens"])
    np.testing.assert_allclose(one["loss"], two["loss"], rtol=1e-4)
    assert len(set(one["tokens"].tolist())) > 6
