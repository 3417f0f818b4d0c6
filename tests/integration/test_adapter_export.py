"""`mem checkpoints export` of a run that trained a part of its model: what plain peft and transformers load computes what the run did."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_model import own_model

from flows.commands.export import export_checkpoint
from mem_core.domain.errors import RequestError
from mem_core.domain.request import ModelSection, RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.runtime.models.build import build_model, save_pretrained_folder
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.testing.tokenizer_folders import byte_level_bpe

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks transformers for it
]
Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]
TRAINING = {"max_steps": 4, "segment_steps": 4, "global_batch_size": 4, "warmup_steps": 0, "learning_rate": 1e-2}
LORA = {"rank": 4, "alpha": 12.5, "dropout": 0.1}
TOKENS = torch.arange(3, 67).reshape(2, 32)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A preset's weights in a folder of their own, with a tokenizer whose files carry bytes that no library would write."""
    model = ModelSection()
    module = build_model(model, 128, 3, "float32", activation_checkpointing=False)
    save_pretrained_folder(model, dict(module.named_parameters()), tmp_path / "base")
    for path in (tmp_path / "base").glob("*token*"):
        path.unlink()
    byte_level_bpe().save(str(tmp_path / "base" / "tokenizer.json"))
    (tmp_path / "base" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast",\n\n "eos_token": "<end>"}')
    return tmp_path / "base"


def own_logits(request: RuntimeRequest, server: ForkServer, result: RunResult, tmp_path: Path) -> torch.Tensor:
    """Logits of the model as the run built it, with the trained weights of its last checkpoint as DeepSpeed reads them."""
    return logits_of(own_model(request, server, Path(result.run_folder) / "checkpoints" / "step-000000004", tmp_path))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def whole_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)


def with_peft(base: Path, adapters: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(whole_model(base), str(adapters))


@pytest.mark.parametrize(("zero_stage", "num_ranks"), [pytest.param(1, 1, marks=pytest.mark.slow), (3, 2)])
def test_adapters_and_merged_model_compute_what_the_run_did(
    zero_stage: int, num_ranks: int, nano: Nano, drive: Drive, fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    request = nano(
        "run", model={"source": str(model_folder), "lora": LORA}, training=TRAINING,
        parallel={"zero_stage": zero_stage, "num_ranks": num_ranks},
    )  # fmt: skip
    wanted = own_logits(request, fork_server, drive(request), tmp_path)
    assert distance(logits_of(whole_model(model_folder)), wanted) > 1e-3, "training changed nothing that could be seen"
    assert export_checkpoint(tmp_path / "run", None, None, as_json=False) == 0
    assert export_checkpoint(tmp_path / "run", None, None, as_json=False, merge=True) == 0
    adapters, merged = (tmp_path / "run" / "export" / f"step-000000004{ending}" for ending in ("", "-merged"))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapters.iterdir()}
    assert not list(adapters.glob("model*.safetensors")), "the base is not stored again"
    assert distance(logits_of(with_peft(model_folder, adapters)), wanted) < 1e-5
    assert distance(logits_of(whole_model(merged)), wanted) < 1e-5
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert len({path.stat().st_mode for path in (*merged.iterdir(), *adapters.iterdir())}) == 1, "a group shares what the umask says"
        assert (merged / name).read_bytes() == (adapters / name).read_bytes() == (model_folder / name).read_bytes()


@pytest.mark.slow
def test_a_preset_s_adapters_bring_the_model_that_no_loader_knows(
    nano: Nano, drive: Drive, fork_server: ForkServer, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    request = nano("run", model={"lora": LORA}, training=TRAINING)
    wanted = own_logits(request, fork_server, drive(request), tmp_path)
    assert export_checkpoint(tmp_path / "run", None, tmp_path / "adapters", as_json=False) == 0
    assert distance(logits_of(AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapters"))), wanted) < 1e-5


@pytest.mark.slow
def test_frozen_weights_are_exported_as_they_were(
    nano: Nano, drive: Drive, fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    request = nano("run", model={"source": str(model_folder), "freeze": ["model.embed_tokens.*", "*.mlp.*"]}, training=TRAINING)
    wanted = own_logits(request, fork_server, drive(request), tmp_path)
    assert export_checkpoint(tmp_path / "run", None, None, as_json=False) == 0
    exported, base = whole_model(tmp_path / "run" / "export" / "step-000000004"), whole_model(model_folder)
    assert distance(logits_of(exported), wanted) < 1e-5
    same = {name for name, value in exported.named_parameters() if torch.equal(value, base.get_parameter(name))}
    assert same == {name for name, _ in base.named_parameters() if "embed" in name or ".mlp." in name}
    with pytest.raises(RequestError, match="nothing to merge"):
        export_checkpoint(tmp_path / "run", None, None, as_json=False, merge=True)


def test_a_changed_model_folder_is_named_when_resuming_and_exporting(nano: Nano, drive: Drive, model_folder: Path, tmp_path: Path) -> None:
    """One weight by one bit, in a file of the same size and header: nothing but its content tells."""
    request = nano("run", model={"source": str(model_folder), "lora": LORA}, training=TRAINING)
    drive(request)
    weights = model_folder / "model.safetensors"
    shutil.copyfile(weights, tmp_path / "kept")
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    further = request.model_copy(update={"training": request.training.model_copy(update={"max_steps": 8})})
    with pytest.raises(RequestError) as refused:
        drive(further)
    assert refused.value.exit_code == 64
    assert str(model_folder) in str(refused.value)
    with pytest.raises(RequestError, match="has changed"):
        export_checkpoint(tmp_path / "run", None, None, as_json=False)
    shutil.copyfile(tmp_path / "kept", weights)
    assert drive(further).applied_steps == 8, "nothing was set aside meanwhile"
