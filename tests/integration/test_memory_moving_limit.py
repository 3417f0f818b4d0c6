"""A real limit that moves while the run trains: address space is taken away in mid-run and given back."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mem_core.core.memory_control import PATIENCE_STEPS
from mem_core.core.run_fold import fold_state
from mem_core.core.state_manager import read_journal
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.memory_faults import move_address_space

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


def weights(result: RunResult) -> np.ndarray:
    """All weights of the last checkpoint, one after the other."""
    folder = Path(result.run_folder) / "checkpoints" / f"step-{STEPS:09d}"
    state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    return np.concatenate([tensor.float().numpy().ravel() for _, tensor in sorted(state.items())])


def test_address_space_taken_away_and_given_back(drive: Callable[..., RunResult], tmp_path: Path) -> None:
    """Shrinks within the tight batches, completes, grows back within the patience after them; near weights, and a twin's bits."""
    request = request_of(tmp_path, "moving")

    def squeeze(draft: Any) -> None:
        segments = draft.session.segments
        segments.spec = replace(segments.spec, on_built=partial(move_address_space, tight=TIGHT, headroom_bytes=HEADROOM_BYTES))

    result = drive(request, prepared=squeeze)
    changes = fold_state(read_journal(Path(result.run_folder) / "journal")).memory_plan_changes
    assert (result.status, result.applied_steps, result.ooms_fatal, result.restarts) == ("completed", STEPS, 0, 0)
    assert TIGHT[0] <= changes[0].batch_index <= TIGHT[1], "it bites"
    grown = [change for change in changes if change.reason.startswith("grow")]
    assert grown, changes
    assert TIGHT[1] <= grown[0].batch_index <= TIGHT[1] + PATIENCE_STEPS + 10
    print(f"ooms_absorbed {result.ooms_absorbed}", *(f"batch {change.batch_index}: {change.reason}" for change in changes), sep="\n")

    def replay(draft: Any) -> None:
        segments = draft.session.segments
        segments.fresh = segments.fresh.model_copy(update={"memory_plan_changes": changes})

    fixed = request.memory.model_copy(update={"mode": "fixed"})
    twin = drive(request.model_copy(update={"run_id": "twin", "memory": fixed}), prepared=replay)
    assert (twin.weights_digest, twin.trajectory_digest) == (result.weights_digest, result.trajectory_digest)
    free = drive(request.model_copy(update={"run_id": "free"}))
    assert np.linalg.norm(weights(result) - weights(free)) / np.linalg.norm(weights(free)) <= 1e-5
