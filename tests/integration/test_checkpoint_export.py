"""`mem checkpoints export` at every kind of sharding: what transformers loads is what was saved, and nothing unproven is exported."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.commands.export import export_checkpoint
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult

pytestmark = pytest.mark.integration
TRAINING = {"max_steps": 10, "segment_steps": 5, "global_batch_size": 4, "warmup_steps": 2}


def digest_of_folder(folder: Path) -> str:
    """SHA-256 over name, shape and float32 bytes of each parameter of what `from_pretrained` makes of a folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters(), key=lambda item: item[0]):
        digest.update(f"{name}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(("zero_stage", "num_ranks"), [(1, 1), (3, 2)])
def test_export_is_what_was_saved(
    zero_stage: int,
    num_ranks: int,
    nano: Callable[..., RuntimeRequest],
    drive: Callable[..., RunResult],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder that transformers loads has, to the bit, the digest that the run recorded; an older step gives its own weights."""
    result = drive(nano("run", training=TRAINING, parallel={"zero_stage": zero_stage, "num_ranks": num_ranks}))
    assert export_checkpoint(tmp_path / "run", None, None, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step"], answer["weights_digest"]) == (10, result.weights_digest)
    assert digest_of_folder(Path(answer["folder"])) == result.weights_digest
    assert export_checkpoint(tmp_path / "run", 5, tmp_path / "older", as_json=True) == 0
    older = json.loads(capsys.readouterr().out)["weights_digest"]
    assert digest_of_folder(tmp_path / "older") == older != result.weights_digest


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "num_ranks"), [(0, 1), (2, 2), (3, 1)])
def test_export_of_the_other_stages(
    zero_stage: int, num_ranks: int, nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path
) -> None:
    """The same at the other stages."""
    result = drive(nano("run", training=TRAINING, parallel={"zero_stage": zero_stage, "num_ranks": num_ranks}))
    assert export_checkpoint(tmp_path / "run", None, None, as_json=False) == 0
    assert digest_of_folder(tmp_path / "run" / "export" / "step-000000010") == result.weights_digest


def test_nothing_unproven_is_exported(nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path) -> None:
    """A bit that flipped after the verdict is found before anything is unpickled; a step that is not there is named with those that are."""
    drive(nano("run", training=TRAINING))
    damaged = tmp_path / "run" / "checkpoints" / "step-000000010" / "mp_rank_00_model_states.pt"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(NoValidCheckpoint, match="SHA-256"):
        export_checkpoint(tmp_path / "run", None, None, as_json=False)
    assert not (tmp_path / "run" / "export" / "step-000000010").exists()
    with pytest.raises(NoValidCheckpoint, match="5, 10"):
        export_checkpoint(tmp_path / "run", 7, None, as_json=False)
    with pytest.raises(RequestError, match="no such run"):
        export_checkpoint(tmp_path / "other", None, None, as_json=False)
