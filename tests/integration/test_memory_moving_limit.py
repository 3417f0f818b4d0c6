"""A real limit that moves while the run trains: address space is taken away in mid-run and given back."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mem_core.core.memory.control import PATIENCE_STEPS
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.memory_faults import move_address_space
from mem_core.testing.ports import distance, recorded, replaying, with_port

pytestmark = [pytest.mark.integration, pytest.mark.slow]
STEPS, TIGHT = 150, (20, 45)
HEADROOM_BYTES = 60 * 2**20


def request_of(store: Path, run_id: str) -> RuntimeRequest:
    """Eight rows of 256 tokens a step, in one pass as long as memory allows it."""
    path = store / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number:06d} " * 23}) + "\n" for number in range(2_000)))
    return RuntimeRequest.model_validate(
        {
            "run_id": run_id, "store": str(store), "device": "cpu", "model": {"source": "preset:llama-tiny"},
            "data": {"train": [str(path)], "validation": None, "sequence_length": 256, "packing": False},
            "training": {"max_steps": STEPS, "segment_steps": STEPS // 2, "global_batch_size": 8, "warmup_steps": 2},
        }
    )  # fmt: skip


def test_address_space_taken_away_and_given_back(drive: Callable[..., RunResult], tmp_path: Path) -> None:
    """Shrinks within the tight batches, completes, grows back within the patience after them; near weights, and a twin's bits."""
    request = request_of(tmp_path, "moving")

    result = drive(request, options=with_port(partial(move_address_space, tight=TIGHT, headroom_bytes=HEADROOM_BYTES)))
    changes = recorded(result)
    assert (result.status, result.applied_steps, result.ooms_fatal, result.restarts) == ("completed", STEPS, 0, 0)
    assert TIGHT[0] <= changes[0].batch_index <= TIGHT[1], "it bites"
    grown = [change for change in changes if change.reason.startswith("grow")]
    assert grown, changes
    assert TIGHT[1] <= grown[0].batch_index <= TIGHT[1] + PATIENCE_STEPS + 10
    print(f"ooms_absorbed {result.ooms_absorbed}", *(f"batch {change.batch_index}: {change.reason}" for change in changes), sep="\n")

    fixed = request.memory.model_copy(update={"mode": "fixed"})
    twin = drive(request.model_copy(update={"run_id": "twin", "memory": fixed}), options=replaying(changes))
    assert (twin.weights_digest, twin.trajectory_digest) == (result.weights_digest, result.trajectory_digest)
    free = drive(request.model_copy(update={"run_id": "free"}))
    assert distance(result, free) <= 1e-5
