"""What is left out on one rank leaves every bit as DeepSpeed makes it; a version that changes what is replaced is noticed here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.deepspeed.one_rank import norm_of_all
from mem_core.testing.ports import with_port

pytestmark = pytest.mark.integration
STEPS = 4


def beside_its_own(runner: Any, log: Path) -> None:
    """At each step: DeepSpeed's own norm and its own views beside those that replace them."""
    optimizer = runner.engine.raw.optimizer
    norm, views = optimizer.get_grad_norm_direct, optimizer._update_model_bit16_weights

    def compared_norm(gradients: Any, params: Any, norm_type: float = 2) -> torch.Tensor:
        ours, theirs = norm(gradients, params, norm_type), norm.args[0](gradients, params, norm_type)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        log.open("a").write(f"norm {torch.equal(ours, theirs)}\n")
        return ours

    def compared_views(group_index: int) -> None:
        views(group_index)
        params = optimizer.bit16_groups[group_index]
        ours = [(param.data_ptr(), tuple(param.shape), param.stride()) for param in params]
        views.args[1](group_index)
        theirs = [(param.data_ptr(), tuple(param.shape), param.stride()) for param in params]
        log.open("a").write(f"views {ours == theirs}\n")

    optimizer.get_grad_norm_direct, optimizer._update_model_bit16_weights = compared_norm, compared_views


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
def test_what_is_left_out_changes_no_bit(drive: Callable[..., RunResult], tmp_path: Path, lora: dict[str, int] | None) -> None:
    """Two groups a step (with weight decay and without), of every weight and of adapters; a group that is empty has no norm."""
    log = tmp_path / "log"
    request = RuntimeRequest.model_validate(
        {
            "run_id": "alone", "store": str(tmp_path), "device": "cpu", "model": {"source": "preset:llama-nano", "lora": lora},
            "data": {"validation": None, "sequence_length": 32},
            "training": {"max_steps": STEPS, "segment_steps": 2, "global_batch_size": 4, "warmup_steps": 1},
        }
    )  # fmt: skip
    result = drive(request, options=with_port(partial(beside_its_own, log=log)))
    lines = log.read_text().split("\n")[:-1]
    assert result.status == "completed"
    assert (len([line for line in lines if "norm" in line]) >= STEPS, set(lines)) == (True, {"norm True", "views True"})


def with_hooks(runner: Any) -> None:
    """DeepSpeed's own hooks on every weight, as they were before they were left out."""
    optimizer = runner.engine.raw.optimizer
    assert optimizer._grad_acc_hooks == []
    optimizer.create_gradient_handling_hooks()
    assert len(optimizer._grad_acc_hooks) == len(runner.engine.trained_parameters())


def test_hooks_that_are_left_out_change_no_bit(drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest]) -> None:
    """Four passes a step, so that gradients are accumulated."""
    training = {"max_steps": STEPS, "segment_steps": 2, "global_batch_size": 8, "warmup_steps": 1}
    data = {"validation": None, "sequence_length": 32}
    results = [
        drive(nano(name, training=training, data=data, memory={"micro_batch_size": 2}), options=with_port(port))
        for name, port in (("without", nothing), ("with", with_hooks))
    ]
    assert len({(each.weights_digest, each.trajectory_digest) for each in results}) == 1


def nothing(runner: Any) -> None:
    """Leaves everything as it is."""


def test_a_norm_that_is_not_finite_is_told_as_deepspeed_tells_it() -> None:
    """-1, in single precision; anything but the Euclidean norm goes to DeepSpeed."""

    def own(*_: Any) -> torch.Tensor:
        return torch.tensor(7.0)

    for value in (float("inf"), float("nan")):
        found = norm_of_all(own, [torch.ones(3), torch.tensor([1.0, value])], [])
        assert (found.item(), found.dtype) == (-1.0, torch.float32)
    assert norm_of_all(own, [torch.tensor([3.0]), torch.tensor([4.0])], []).item() == 5.0
    assert norm_of_all(own, [torch.ones(3)], [], float("inf")).item() == 7.0
    assert norm_of_all(own, [], []).item() == 7.0
