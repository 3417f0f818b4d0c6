"""Going on with other ranks and another ZeRO stage: the same run up to rounding, only where it is allowed, and only if it is proven."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.state_manager import RunRecord, read_journal
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.events import Noted
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.proof.reshard_service import differences
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence
from mem_core.runtime.session.opening.stages import OpeningOptions

TRAINING = {"segment_steps": 6, "global_batch_size": 4, "warmup_steps": 3, "schedule_steps": 18}
Nano = Callable[..., RuntimeRequest]
Drive = Callable[..., RunResult]


def shaped(nano: Nano, run_id: str, max_steps: int, num_ranks: int, zero_stage: int) -> RuntimeRequest:
    """A run of 18 planned steps that stops at `max_steps`."""
    return nano(run_id, training={**TRAINING, "max_steps": max_steps}, parallel={"num_ranks": num_ranks, "zero_stage": zero_stage})


def weights(folder: Path, step: int, output: Path) -> dict[str, Any]:
    """Merged weights of a checkpoint by name, through the export."""
    from safetensors.torch import load_file

    from flows.commands.export import export_checkpoint

    export_checkpoint(folder, step, output, as_json=False)
    return load_file(output / "model.safetensors")


def relative_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Norm of the difference of all weights over the norm of the weights."""
    assert one.keys() == other.keys()
    away = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    size = sum(float(one[name].double().square().sum()) for name in one)
    return (away / size) ** 0.5


def test_differences_beyond_rounding_are_named() -> None:
    """Rounding passes, more does not; a norm that one of the stages does not tell is not compared."""
    old = ReplayEvidence(6, None, (3.0, 2.0), (1.0, 0.5))  # type: ignore[arg-type]
    near = ReplayEvidence(6, None, (3.0, 2.0 + 1e-6), (1.0, None))  # type: ignore[arg-type]
    far = ReplayEvidence(6, None, (3.0, 2.0 + 1e-4), (1.0, 0.5))  # type: ignore[arg-type]
    assert differences(old, near, 1e-5) == ()
    assert differences(old, far, 1e-5) == (f"loss of step 8 is {2.0 + 1e-4!r}, in the old shape 2.0",)


@pytest.mark.integration
def test_one_rank_to_two_to_one_at_other_stages(nano: Nano, drive: Drive, tmp_path: Path) -> None:
    """1 rank at stage 1, 2 ranks at stage 2, 1 rank at stage 3: the same weights as an undisturbed run, up to rounding."""
    drive(shaped(nano, "run", 6, 1, 1))
    drive(shaped(nano, "run", 12, 2, 2), options=OpeningOptions(allow_reshard=True))
    drive(shaped(nano, "run", 18, 1, 3), options=OpeningOptions(allow_reshard=True))
    drive(shaped(nano, "undisturbed", 18, 1, 1))
    after = weights(tmp_path / "run", 18, tmp_path / "one")
    assert relative_difference(after, weights(tmp_path / "undisturbed", 18, tmp_path / "other")) <= 1e-5
    record = RunRecord.model_validate_json((tmp_path / "run" / "run.json").read_bytes())
    assert (record.request.parallel.num_ranks, record.request.parallel.zero_stage) == (1, 3)
    notes = [line.event.text for line in read_journal(tmp_path / "run" / "journal") if isinstance(line.event, Noted)]
    assert sum("converted from 1 rank at ZeRO stage 1 to 2 ranks at ZeRO stage 2" in note for note in notes) == 1
    assert sum("converted from 2 ranks at ZeRO stage 2 to 1 rank at ZeRO stage 3" in note for note in notes) == 1
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-000000012" / "manifest.json").read_bytes())
    assert manifest["extra"]["resharded_from"]["num_ranks"] == 2
    assert not list((tmp_path / "run" / "staging").glob("*/save-*")), "what the conversion needed on the way is gone"


@pytest.mark.integration
def test_without_the_flag_it_is_refused(nano: Nano, drive: Drive) -> None:
    """Exit 64 with the choices: the old shape, the flag, another run; from and to stage 0 the flag does not help and says what would."""
    drive(shaped(nano, "run", 6, 1, 1))
    with pytest.raises(RequestError) as refused:
        drive(shaped(nano, "run", 12, 2, 1))
    assert refused.value.exit_code == 64
    for choice in ("parallel.num_ranks: 1", "--allow-reshard", "another run_id"):
        assert choice in str(refused.value)
    with pytest.raises(RequestError, match="1 to 3, with any number of ranks"):
        drive(shaped(nano, "run", 12, 1, 0), options=OpeningOptions(allow_reshard=True))
    assert drive(shaped(nano, "run", 12, 1, 1)).applied_steps == 12


@pytest.mark.integration
def test_lost_optimizer_state_is_caught(nano: Nano, drive: Drive, tmp_path: Path) -> None:
    """Moments that came out of the converter as zeros: right weights, wrong next steps. Refused, and the old shape goes on."""
    drive(shaped(nano, "run", 6, 1, 1))
    before = (tmp_path / "run" / "checkpoints" / "step-000000006" / "manifest.json").read_bytes()
    seen: list[Path] = []

    def forget(folder: Path) -> None:
        seen.extend(zero_moments(folder))

    with pytest.raises(NoValidCheckpoint, match="loss of step 8"):
        drive(shaped(nano, "run", 12, 2, 2), options=OpeningOptions(allow_reshard=True, on_converted=forget))
    assert seen
    assert (tmp_path / "run" / "checkpoints" / "step-000000006" / "manifest.json").read_bytes() == before
    assert drive(shaped(nano, "run", 12, 1, 1)).applied_steps == 12


def zero_moments(folder: Path) -> list[Path]:
    """Overwrite Adam's moments of a universal checkpoint with zeros; returns the files."""
    import torch

    files = [path for name in ("exp_avg", "exp_avg_sq") for path in folder.glob(f"zero/*/{name}.pt")]
    for path in files:
        content = torch.load(path, weights_only=True)
        if isinstance(content, dict):
            content["param"].zero_()
        else:
            content.zero_()
        torch.save(content, path)
    return files


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(("before", "after"), [((1, 1), (1, 3)), ((1, 3), (2, 1)), ((2, 3), (1, 2)), ((2, 3), (1, 3)), ((1, 0), (2, 0))])
def test_other_pairs_of_shapes(before: tuple[int, int], after: tuple[int, int], nano: Nano, drive: Drive, tmp_path: Path) -> None:
    """Every family of conversion: the weights of an undisturbed run up to rounding."""
    drive(shaped(nano, "run", 6, *before))
    drive(shaped(nano, "run", 18, *after), options=OpeningOptions(allow_reshard=True))
    drive(shaped(nano, "undisturbed", 18, *before))
    one = weights(tmp_path / "run", 18, tmp_path / "one")
    assert relative_difference(one, weights(tmp_path / "undisturbed", 18, tmp_path / "other")) <= 1e-5
