"""The whole table of injected OOM: forward, backward, step x ZeRO 0-3 x 1 and 2 ranks x first, middle, last pass, twice in a row each."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.memory_faults import PlannedOom, fail_allocations, fired
from mem_core.testing.ports import recorded, replaying, with_port

pytestmark = [pytest.mark.integration, pytest.mark.slow]
Drive = Callable[..., RunResult]
STEPS = 8
LORA: dict[str, Any] = {"lora": {"rank": 4, "dropout": 0.1}}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 50 to 96 tokens: two padded lengths, so that the last pass of a batch is about as large as the first."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join('{"text": "' + "words and " * 4 + "x" * (10 + (7 * n) % 45) + '"}\n' for n in range(128 * STEPS)))
    return path


def request_of(store: Path, run_id: str, documents: Path, stage: int, ranks: int, part: dict[str, Any]) -> RuntimeRequest:
    """Eight steps in two segments of batches that are large enough to be halved seven times."""
    return RuntimeRequest.model_validate(
        {
            "run_id": run_id, "store": str(store), "device": "cpu", "model": part,
            "data": {"train": [str(documents)], "validation": None, "sequence_length": 96, "packing": False},
            "training": {"max_steps": STEPS, "segment_steps": STEPS // 2, "global_batch_size": 128, "warmup_steps": 2},
            "parallel": {"num_ranks": ranks, "zero_stage": stage},
        }
    )  # fmt: skip


@pytest.mark.parametrize(("where", "part"), [("first", {}), ("middle", {}), ("last", {}), ("middle", LORA)])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_cell(stage: int, ranks: int, where: Any, part: dict[str, Any], drive: Drive, documents: Path, tmp_path: Path) -> None:
    """Three cells in one run, each fails twice in a row; the twin that replays the recorded splits meets none and has the same bits.

    The two failures in the update come first: each halves the plan, so that the passes that fail afterwards are several.
    """
    rank = ranks - 1
    plans = (
        PlannedOom("step", 1, where, times=2, rank=rank),
        PlannedOom("forward", 3, where, times=2, rank=rank),
        PlannedOom("backward", 5, where, times=2, rank=rank),
    )
    request = request_of(tmp_path, "table", documents, stage, ranks, part)
    result = drive(request, options=with_port(partial(fail_allocations, plans=plans, folder=tmp_path)))
    assert [fired(tmp_path, number) for number in range(len(plans))] == [2, 2, 2]
    assert (result.status, result.ooms_absorbed, result.ooms_fatal) == ("completed", 6, 0)
    assert result.restarts == (2 if stage <= 1 else 6)
    changes = recorded(result)
    assert {change.batch_index for change in changes} == {1, 3, 5}
    assert min(passes for number in (1, 2) for passes in (tmp_path / str(number)).read_bytes()) >= 3  # three different ones
    twin = drive(request.model_copy(update={"run_id": "twin"}), options=replaying(changes))
    assert (twin.ooms_absorbed, twin.restarts, twin.applied_steps) == (0, 0, STEPS)
    assert (twin.weights_digest, twin.trajectory_digest) == (result.weights_digest, result.trajectory_digest)
