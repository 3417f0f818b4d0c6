"""Runs that train adapters or a part of the model keep every promise of those that train the whole: bits, shapes, proofs, mirrors."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.domain.events import CheckpointJudged
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.session.opening.stages import OpeningOptions

pytestmark = pytest.mark.integration
Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]
K = 4
LORA: dict[str, Any] = {"lora": {"rank": 4, "dropout": 0.1}}
FROZEN: dict[str, Any] = {"freeze": ["model.embed_tokens.*", "*.mlp.*"]}
TRAINING = {"global_batch_size": 4, "warmup_steps": 2, "segment_steps": K, "learning_rate": 1e-2, "schedule_steps": 3 * K}


def request(
    nano: Nano, run_id: str, steps: int, part: dict[str, Any], zero_stage: int = 1, num_ranks: int = 1, **more: Any
) -> RuntimeRequest:
    parallel = {"zero_stage": zero_stage, "num_ranks": num_ranks}
    data = {} if "evaluation" in more else {"validation": None}  # half the time of such short runs
    return nano(run_id, model=part, data=data, training=TRAINING | {"max_steps": steps}, parallel=parallel, **more)


def digests(result: RunResult) -> tuple[str, str]:
    assert result.status == "completed"
    return result.weights_digest, result.trajectory_digest


def check_resume(
    nano: Nano, drive: Drive, part: dict[str, Any], zero_stage: int, num_ranks: int, every_steps: int | None = None
) -> tuple[str, str]:
    """k steps, a resume in fresh processes and k steps against 2k steps. `every_steps`: how often the cut run alone looks at held-out
    rows."""

    def asked(run_id: str, steps: int, every_steps: int | None) -> RuntimeRequest:
        more = {} if every_steps is None else {"evaluation": {"every_steps": every_steps, "max_rows": 4}}
        return request(nano, run_id, steps, part, zero_stage, num_ranks, **more)

    drive(asked("cut", K, every_steps))
    cut = digests(drive(asked("cut", 2 * K, every_steps)))
    whole = digests(drive(asked("whole", 2 * K, None if every_steps is None else 100 * K)))
    assert cut == whole
    return whole


@pytest.mark.parametrize(
    ("part", "zero_stage", "num_ranks", "every_steps"),
    [
        (LORA, 1, 1, K // 2), (FROZEN, 2, 1, None), (LORA, 3, 2, K // 2),
        (LORA | {"dtype": "bfloat16"}, 0, 1, None),
    ],
)  # fmt: skip
def test_k_resume_k_is_2k(part: dict[str, Any], zero_stage: int, num_ranks: int, every_steps: int | None, nano: Nano, drive: Drive) -> None:
    check_resume(nano, drive, part, zero_stage, num_ranks, every_steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", [LORA, FROZEN])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_k_resume_k_is_2k_at_every_stage(zero_stage: int, num_ranks: int, part: dict[str, Any], nano: Nano, drive: Drive) -> None:
    """With held-out rows looked at in the middle and at the end of both halves; the run that goes through looks at none."""
    check_resume(nano, drive, part, zero_stage, num_ranks, every_steps=K // 2)


def test_a_checkpoint_holds_what_trains_and_the_fingerprint_of_the_rest(nano: Nano, drive: Drive, tmp_path: Path) -> None:
    """The sum of its files is that of the trained numbers and their optimizer; the base, tied head included, is nowhere in them."""
    import torch

    whole, adapters = (drive(request(nano, name, K, part)) for name, part in (("whole", {}), ("adapters", LORA)))
    folder = tmp_path / "adapters" / "checkpoints" / "step-000000004"
    manifest = CheckpointManifest.model_validate_json((folder / "manifest.json").read_bytes())
    state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    assert set(state["module"]) == set(manifest.parameters)
    assert all(".lora_A." in name or ".lora_B." in name for name in manifest.parameters)
    assert len(state["mem_base_sha256"]) == 64
    full = torch.load(tmp_path / "whole" / "checkpoints" / "step-000000004" / "mp_rank_00_model_states.pt", weights_only=True)
    assert "mem_base_sha256" not in full
    assert whole.weights_digest != adapters.weights_digest


@pytest.mark.slow
def test_adapters_go_on_in_other_shapes(nano: Nano, drive: Drive, tmp_path: Path) -> None:
    """1 rank at stage 1, 2 ranks at stage 2, 1 rank at stage 3, proven at each change; no dropout, which depends on the rank."""
    part = {"lora": {"rank": 4}}
    drive(request(nano, "run", K, part))
    drive(request(nano, "run", 2 * K, part, 2, 2), options=OpeningOptions(allow_reshard=True))
    drive(request(nano, "run", 3 * K, part, 3, 1), options=OpeningOptions(allow_reshard=True))
    drive(request(nano, "undisturbed", 3 * K, part))
    one, other = (adapters_of(tmp_path / name, tmp_path / f"{name}-export") for name in ("run", "undisturbed"))
    assert one.keys() == other.keys()
    away = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    assert (away / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5 <= 1e-5


def adapters_of(folder: Path, output: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    from flows.commands.export import export_checkpoint

    export_checkpoint(folder, 3 * K, output, as_json=False)
    return load_file(output / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((1, 3), (2, 1)), ((2, 3), (1, 2)), ((1, 0), (2, 0))])
def test_other_pairs_of_shapes(before: tuple[int, int], after: tuple[int, int], nano: Nano, drive: Drive, tmp_path: Path) -> None:
    """(ranks, stage): every family of conversion, of a partly frozen model."""
    drive(request(nano, "run", K, FROZEN, before[1], before[0]))
    again = drive(request(nano, "run", 2 * K, FROZEN, after[1], after[0]), options=OpeningOptions(allow_reshard=True))
    assert again.applied_steps == 2 * K


@pytest.mark.slow
def test_replays_prove_them_and_a_mirror_brings_them_back(nano: Nano, drive: Drive, tmp_path: Path) -> None:
    """Every checkpoint is redone in fresh processes; after the run's folder is lost its mirror and the base go on to the same bits."""
    checkpoint = {"validation": "replay", "mirror": f"file://{tmp_path / 'mirror'}"}
    drive(request(nano, "run", K, LORA, checkpoint=checkpoint))
    verdicts = [line.event.verdict for line in read_journal(tmp_path / "run" / "journal") if isinstance(line.event, CheckpointJudged)]
    assert [(verdict.level, verdict.valid) for verdict in verdicts] == [("replay", True)]
    shutil.rmtree(tmp_path / "run")
    back = digests(drive(request(nano, "run", 2 * K, LORA, checkpoint=checkpoint)))
    assert back == digests(drive(request(nano, "whole", 2 * K, LORA)))
