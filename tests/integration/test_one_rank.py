"""What is left out for a single rank changes no number: stage 1 without the buffers of DeepSpeed against stage 1 with them."""

from collections.abc import Callable
from typing import Any

import pytest

from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.ports import with_port

pytestmark = pytest.mark.integration
STEPS = 12


def with_buffers(runner: Any) -> None:
    """Give a rank back what DeepSpeed has by default."""
    optimizer = runner.engine.raw.optimizer
    assert not optimizer.contiguous_gradients, "stage 1 on one rank goes without"
    optimizer.contiguous_gradients = True
    del optimizer.buffered_reduce_fallback


@pytest.mark.parametrize("part", [{}, {"lora": {"rank": 4, "dropout": 0.1}}], ids=["whole", "lora"])
def test_gradients_that_stay_in_place_give_the_same_bits(
    part: dict[str, Any], drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest]
) -> None:
    """With clipping that acts, several micro-batches a step, and a resume in between."""

    def asked(run_id: str, steps: int = STEPS) -> RuntimeRequest:
        training = {"max_steps": steps, "segment_steps": STEPS // 2, "schedule_steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 2}
        memory = {"mode": "fixed", "micro_batch_size": 2}
        return nano(run_id, model=part, data={"validation": None}, training={**training, "gradient_clip_norm": 0.1}, memory=memory)

    drive(asked("in-place", STEPS // 2))
    in_place, copied = drive(asked("in-place")), drive(asked("copied"), options=with_port(with_buffers))
    assert (in_place.weights_digest, in_place.trajectory_digest) == (copied.weights_digest, copied.trajectory_digest)
