"""Several ranks on several CUDA devices: each on its own and nowhere else. Skipped where there are fewer than two devices."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.request import RuntimeRequest
from mem_core.testing.driver import drive
from mem_core.testing.ports import tell_devices, with_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1_800)]
MODEL = {"source": "preset:llama-nano"}


@pytest.fixture(autouse=True)
def devices() -> None:
    """Two CUDA devices, or the test is skipped."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < 2:
        pytest.skip(f"two CUDA devices are needed, this machine has {found}")


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_each_rank_trains_on_its_own_device(nano: Callable[..., RuntimeRequest], tmp_path: Path, zero_stage: int) -> None:
    """Model, optimizer and current device of rank N are on device N; it holds nothing on the other one."""
    training = {"max_steps": 20, "segment_steps": 10, "warmup_steps": 2}
    request = nano("two", device="cuda", model=MODEL, training=training, parallel={"num_ranks": 2, "zero_stage": zero_stage})
    result = drive(request, options=with_port(partial(tell_devices, folder=tmp_path)))
    assert (result.status, result.applied_steps, result.device) == ("completed", 20, "cuda")
    for rank in range(2):
        facts: dict[str, Any] = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert facts["parameters"] == [f"cuda:{rank}"]
        assert facts["current"] == rank
        assert facts["held_bytes"][f"cuda:{rank}"] > 0
        assert facts["held_bytes"][f"cuda:{1 - rank}"] == 0
