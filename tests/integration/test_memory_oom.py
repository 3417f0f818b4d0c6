"""Injected OOM in forward, backward and step, at every ZeRO stage: absorbed or restored, and equal to a replayed twin to the bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.memory.control import PATIENCE_STEPS
from mem_core.domain.errors import MemoryExhausted
from mem_core.domain.request import LoraSection, ModelSection, RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.memory_faults import PlannedOom, fail_allocations, fired, script_memory
from mem_core.testing.ports import recorded, replaying, with_port

pytestmark = pytest.mark.integration
Drive = Callable[..., RunResult]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of uneven length, so that packing by tokens has something to do."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join('{"text": "' + f"row {n} " * (1 + (7 * n) % 11) + '"}\n' for n in range(60)))
    return path


def request_of(store: Path, run_id: str, documents: Path, stage: int, ranks: int = 1, **memory: Any) -> RuntimeRequest:
    """Eight steps in two segments."""
    return RuntimeRequest.model_validate(
        {
            "run_id": run_id, "store": str(store), "device": "cpu",
            "data": {"train": [str(documents)], "validation": None, "sequence_length": 96, "packing": False},
            "training": {"max_steps": 8, "segment_steps": 4, "global_batch_size": 8, "warmup_steps": 2},
            "parallel": {"num_ranks": ranks, "zero_stage": stage}, "memory": memory,
        }
    )  # fmt: skip


def assert_equals_twin(result: RunResult, request: RuntimeRequest, drive: Drive) -> None:
    """A clean run that replays the recorded splits has the same weights and the same trajectory."""
    twin = drive(request.model_copy(update={"run_id": f"{request.run_id}-twin"}), options=replaying(recorded(result)))
    assert (twin.weights_digest, twin.trajectory_digest) == (result.weights_digest, result.trajectory_digest)
    assert twin.applied_steps == result.applied_steps == 8
    assert twin.ooms_absorbed == 0


FIRST_TWICE = PlannedOom("forward", 2, "first", times=2)
PLANS = {
    "forward-first": (FIRST_TWICE, PlannedOom("backward", 5, "middle")),
    "backward-first": (PlannedOom("backward", 2, "first", times=2), PlannedOom("forward", 5, "last")),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "plans", [pytest.param(PLANS["forward-first"], id="a"), pytest.param(PLANS["backward-first"], id="b", marks=pytest.mark.slow)]
)
def test_an_oom_leaves_no_trace_in_the_result(
    plans: tuple[PlannedOom, ...], stage: int, ranks: int, drive: Drive, documents: Path, tmp_path: Path
) -> None:
    """Stages 0 and 1 do the step again, on all ranks; 2 and 3 restore. Either way a twin with the recorded splits has the same bits."""
    plans = tuple(replace(plan, rank=ranks - 1) for plan in plans)
    check_no_trace(request_of(tmp_path, f"oom-{stage}", documents, stage, ranks, micro_batch_size=4), plans, drive, tmp_path)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_nor_in_that_of_adapters_with_dropout(stage: int, drive: Drive, documents: Path, tmp_path: Path) -> None:
    request = request_of(tmp_path, f"oom-{stage}", documents, stage, micro_batch_size=4)
    model = ModelSection(lora=LoraSection(rank=4, dropout=0.1))
    check_no_trace(request.model_copy(update={"model": model}), PLANS["forward-first"], drive, tmp_path)


def check_no_trace(request: RuntimeRequest, plans: tuple[PlannedOom, ...], drive: Drive, tmp_path: Path) -> None:
    stage = request.parallel.zero_stage
    result = drive(request, options=with_port(partial(fail_allocations, plans=plans, folder=tmp_path)))
    assert [fired(tmp_path, number) for number in range(len(plans))] == [2, 1]
    assert (result.ooms_absorbed, result.ooms_fatal) == (3, 0)
    assert result.restarts == (0 if stage <= 1 else 3)
    assert {change.batch_index for change in recorded(result)} == {2, 5}
    assert_equals_twin(result, request, drive)


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_oom_in_the_update_restores(stage: int, drive: Drive, documents: Path, tmp_path: Path) -> None:
    """An update may be half applied, so the engine is never used again, at any stage."""
    request = request_of(tmp_path, "oom-step", documents, stage)
    plans = (PlannedOom("step", 5),)
    result = drive(request, options=with_port(partial(fail_allocations, plans=plans, folder=tmp_path)))
    assert (fired(tmp_path, 0), result.restarts, result.ooms_absorbed, result.ooms_fatal) == (1, 1, 1, 0)
    assert_equals_twin(result, request, drive)


def test_mode_fixed_fails_at_once_with_the_cause(drive: Drive, documents: Path, tmp_path: Path) -> None:
    """Adaptation that nobody asked for would hide a wrong setting: one OOM, one try, exit 78."""
    request = request_of(tmp_path, "oom-fixed", documents, 1, mode="fixed")
    plans = (PlannedOom("forward", 2, times=99),)
    with pytest.raises(MemoryExhausted, match=r"mode is fixed") as error:
        drive(request, options=with_port(partial(fail_allocations, plans=plans, folder=tmp_path)))
    assert error.value.exit_code == 78
    assert fired(tmp_path, 0) == 1


def test_the_ladder_ends_with_what_would_fit(drive: Drive, documents: Path, tmp_path: Path) -> None:
    """Rows, then activation checkpointing, then exit 78; never an endless row of restarts."""
    request = request_of(tmp_path, "oom-ladder", documents, 1)
    plans = (PlannedOom("forward", 2, times=999),)
    with pytest.raises(MemoryExhausted) as error:
        drive(request, options=with_port(partial(fail_allocations, plans=plans, folder=tmp_path)))
    assert fired(tmp_path, 0) < 20
    assert "data.sequence_length" in str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_limit_that_is_lowered_and_raised_again(ranks: int, drive: Drive, documents: Path, tmp_path: Path) -> None:
    """Another process takes memory from batch 40 to 120: shrunk without an OOM, grown back within the patience, all ranks at once."""
    request = request_of(tmp_path, "neighbour", documents, 1, ranks)
    request = request.model_copy(update={"training": request.training.model_copy(update={"max_steps": 260, "segment_steps": 130})})
    port = partial(script_memory, tight=(40, 120), per_token=2**20, fixed_bytes=2**30, limits=(2 * 2**30, 2**30 + 500 * 2**20))
    result = drive(request, options=with_port(port))
    changes = recorded(result)
    first = request.training.global_batch_size // ranks
    assert (result.ooms_absorbed, result.restarts) == (0, 0)
    assert changes[0].reason.startswith("shrink")
    assert 40 <= changes[0].batch_index <= 60
    grown = next(change.batch_index for change in changes if change.reason.startswith("grow"))
    assert 120 <= grown <= 120 + PATIENCE_STEPS + 5
    assert changes[-1].plan.micro_batch_tokens == 0 or changes[-1].plan.micro_batch_tokens >= first * 96 // 2
    assert len(changes) <= 8
    twin = drive(request.model_copy(update={"run_id": "neighbour-twin"}), options=replaying(changes))
    assert (twin.weights_digest, twin.trajectory_digest) == (result.weights_digest, result.trajectory_digest)
