"""Checkpoints of a run that trains adapters, damaged in the ways of `test_checkpoint_corruption.py`: every damage is found here, too."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_corruption import Saved, rewrite, undetected

from mem_core.domain.checkpoint import CheckpointManifest, checkpoint_name
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.testing.driver import drive

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
NOT_THE_ENGINE_S = ("manifest.json", "verdict.json")
MODEL = "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def adapters(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The engine's files of steps 1 and 2 of a run, two ranks at ZeRO stage 2, without what was written beside them."""
    store, folder = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("adapters")
    request = RuntimeRequest.model_validate(
        {
            "run_id": "run", "store": str(store), "device": "cpu", "model": {"lora": {"rank": 4, "dropout": 0.1}},
            "data": {"validation": None}, "parallel": {"num_ranks": 2, "zero_stage": 2},
            "training": {"max_steps": 2, "segment_steps": 1, "global_batch_size": 2, "warmup_steps": 0},
        }
    )  # fmt: skip
    drive(request, server=fork_server)
    for step in (1, 2):
        source = store / "run" / "checkpoints" / checkpoint_name(step)
        shutil.copytree(source, folder / f"step-{step}", ignore=shutil.ignore_patterns(*NOT_THE_ENGINE_S))
    manifest = CheckpointManifest.model_validate_json((source / "manifest.json").read_bytes())
    assert all(".lora_" in name for name in manifest.parameters)
    return Saved(folder, 2, 2, dict(manifest.parameters))


@pytest.fixture(scope="module")
def committed(adapters: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with step 2 committed and not yet judged."""
    run_folder = tmp_path_factory.mktemp("committed") / "demo"
    adapters.commit(adapters.manager(run_folder), 2)
    return run_folder


def test_what_a_run_of_adapters_saved_is_sound(adapters: Saved, tmp_path: Path) -> None:
    manager = adapters.manager(tmp_path / "demo")
    for step in (1, 2):
        adapters.commit(manager, step)
        assert manager.validate(step).reasons == ()


@pytest.mark.parametrize("num_damages", [100, pytest.param(1_000, marks=pytest.mark.slow)])
def test_seeded_damages_are_all_found(num_damages: int, adapters: Saved, committed: Path, tmp_path: Path) -> None:
    assert undetected(adapters, committed, tmp_path, range(num_damages)) == []


def spoil_adapter(content: Any) -> None:
    next(iter(content["module"].values()))[0, 0] = float("nan")


def drop_adapter(content: Any) -> None:
    del content["module"][next(iter(content["module"]))]


@pytest.mark.parametrize(("change", "reason", "weights_bad"), [(spoil_adapter, "is not finite", True), (drop_adapter, "is missing", False)])
def test_bad_adapters_with_right_digests_are_found(
    change: Callable[[Any], None], reason: str, weights_bad: bool, adapters: Saved, tmp_path: Path
) -> None:
    manager = adapters.manager(tmp_path / "demo")
    adapters.commit(manager, 2, lambda staging: rewrite(staging / MODEL, change))
    verdict = manager.validate(2)
    assert reason in "; ".join(verdict.reasons)
    assert verdict.weights_bad == weights_bad
