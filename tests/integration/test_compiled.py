"""Compiled passes: the same bits in pieces, after kills, with splits forced by failed allocations, and whatever shape came first."""

import hashlib
import json
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.plan import MemoryPlan, MemoryPlanChange
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.memory_faults import PlannedOom, fail_allocations, fired
from mem_core.testing.ports import Console, recorded, replaying, with_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
Drive = Callable[..., RunResult]
STEPS = 30


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of very different length."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n} " * (1 + (7 * n) % 11)}) + "\n" for n in range(60)))
    return path


def request_of(store: Path, run_id: str, documents: Path, *, ranks: int = 1, stage: int = 1, **sections: Any) -> RuntimeRequest:
    """Rows of 16 to 96 tokens, eight to a batch."""
    return RuntimeRequest.model_validate(
        {
            "run_id": run_id, "store": str(store), "device": "cpu", "model": {"compile": "on"},
            "data": {"train": [str(documents)], "validation": None, "sequence_length": 96, "packing": False},
            "training": {"max_steps": STEPS, "segment_steps": STEPS, "global_batch_size": 8, "warmup_steps": 2},
            "parallel": {"num_ranks": ranks, "zero_stage": stage},
        }
        | sections
    )  # fmt: skip


def in_segments(request: RuntimeRequest, run_id: str, segment_steps: int) -> RuntimeRequest:
    training = request.training.model_copy(update={"segment_steps": segment_steps})
    return request.model_copy(update={"run_id": run_id, "training": training})


def digests(result: RunResult) -> tuple[str | None, str | None]:
    return result.trajectory_digest, result.weights_digest


def kill_a_rank(session: Any, segment: Any) -> None:
    """Before every second segment: its ranks are replaced by newly forked ones."""
    group = session.segments.ranks._group
    if group is not None and segment.segment_index % 2:
        os.kill(group.pids[-1], signal.SIGKILL)


SHAPES = [(rows, length) for rows in (1, 2, 3, 8) for length in (16, 24, 48, 96)]


def passes_in_order(runner: Any, folder: Path, seed: int) -> None:
    """For `with_port`: passes of every shape, padded and full, in an order of the seed's; what their gradients are goes to a file."""
    import torch

    told = folder / f"passes-{seed}.json"
    if told.exists():
        return  # of a later process, which stands at other weights
    order = [(rows, length, padded) for rows, length in SHAPES for padded in (False, True)]
    random.Random(seed).shuffle(order)
    module, said = runner.engine.raw.module, {}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for rows, length, padded in order:
        tokens = torch.arange(rows * length).reshape(rows, length) * 7 % 200
        inputs: dict[str, Any] = {"input_ids": tokens}
        if padded:
            inputs["attention_mask"] = torch.ones_like(tokens).index_fill_(1, torch.tensor([length - 1]), 0)
        found = torch.autograd.grad(module(targets=tokens.clone(), **inputs), trained)
        said[f"{rows} x {length} {padded}"] = hashlib.sha256(b"".join(each.numpy().tobytes() for each in found)).hexdigest()
    told.write_text(json.dumps(said, sort_keys=True))


def test_in_pieces_with_ranks_killed_it_is_the_run_left_in_peace(drive: Drive, documents: Path, tmp_path: Path) -> None:
    """And it is compiled: the same numbers as eager up to rounding, and not to the bit."""
    request = request_of(tmp_path, "whole", documents)
    console = Console()
    whole = drive(request, progress=console, options=with_port(partial(passes_in_order, folder=tmp_path, seed=1)))
    assert "passes are compiled" in console.text or "compiling" not in console.text  # the shared fork server may have done it before
    pieces = drive(
        in_segments(request, "pieces", 4), before_segment=kill_a_rank, options=with_port(partial(passes_in_order, folder=tmp_path, seed=2))
    )
    assert digests(pieces) == digests(whole)
    assert pieces.restarts > 0
    assert (tmp_path / "passes-1.json").read_text() == (tmp_path / "passes-2.json").read_text()
    eager = drive(request.model_copy(update={"run_id": "eager", "model": request.model.model_copy(update={"compile": "off"})}))
    assert digests(eager) != digests(whole)
    assert "not compiled" not in console.text
    assert eager.loss_last == pytest.approx(whole.loss_last, rel=1e-4)


def test_splits_forced_by_failed_allocations_have_the_bits_of_a_twin(drive: Drive, documents: Path, tmp_path: Path) -> None:
    plans = (PlannedOom("forward", 2, "first", times=2), PlannedOom("backward", 5, "middle"))
    request = in_segments(request_of(tmp_path, "oom", documents), "oom", 8)
    found = drive(request, options=with_port(partial(fail_allocations, plans=plans, folder=tmp_path)))
    assert [fired(tmp_path, number) for number in range(len(plans))] == [2, 1]
    twin = drive(request.model_copy(update={"run_id": "twin"}), options=replaying(recorded(found)))
    assert digests(twin) == digests(found)
    assert found.ooms_absorbed == 3


def test_rows_of_plain_text_are_compiled_too_and_what_is_not_is_said(drive: Drive, nano: Callable[..., RuntimeRequest]) -> None:
    """Where every label counts, labels and inputs are one tensor. A plan that begins to recompute activations leaves compiled passes."""
    training = {"max_steps": 4, "segment_steps": 2, "warmup_steps": 0}
    request = nano("text", model={"compile": "on"}, training=training, data={"sequence_length": 96, "validation": None})
    recompute = MemoryPlanChange(batch_index=1, plan=MemoryPlan(micro_batch_rows=8, activation_checkpointing=True), reason="a test")
    said = {}
    for name, changes in (("text", ()), ("recomputed", (recompute,))):
        drive(request.model_copy(update={"run_id": name}), progress=(console := Console()), options=replaying(changes))
        said[name] = console.text
    assert "not compiled" not in said["text"]
    assert said["recomputed"].count("passes of this segment were not compiled") == 1


@pytest.mark.slow
def test_three_hundred_steps_in_pieces_with_kills_and_failed_allocations(drive: Drive, documents: Path, tmp_path: Path) -> None:
    """Killed before every second of 25 segments, with allocations that fail on the way; the twin replays the splits in one piece."""
    long = {"max_steps": 300, "segment_steps": 300, "global_batch_size": 8, "warmup_steps": 2}
    request = request_of(tmp_path, "whole", documents, training=long)
    plans = tuple(PlannedOom(phase, batch, "first") for phase, batch in (("forward", 40), ("backward", 41), ("forward", 170)))  # type: ignore[arg-type]
    failing = with_port(partial(fail_allocations, plans=plans, folder=tmp_path))
    pieces = drive(in_segments(request, "pieces", 12), before_segment=kill_a_rank, options=failing)
    assert pieces.restarts >= 10
    assert pieces.ooms_absorbed == len(plans)
    assert digests(drive(request, options=replaying(recorded(pieces)))) == digests(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (2, 1), (2, 2), (1, 2)])
def test_pieces_of_other_shapes(model: dict[str, Any], ranks: int, stage: int, drive: Drive, documents: Path, tmp_path: Path) -> None:
    request = request_of(tmp_path, "whole", documents, ranks=ranks, stage=stage, model={"compile": "on"} | model)
    whole = drive(request)
    assert digests(drive(in_segments(request, "pieces", 4), before_segment=kill_a_rank)) == digests(whole)
