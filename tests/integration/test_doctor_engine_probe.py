"""What the libraries say of a request, heard by the doctor before anything trains, and by training in the same words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core import bootstrap
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.domain.errors import RequestError
from mem_core.domain.request import ModelSection, RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.models.build import build_model, build_skeleton
from mem_core.runtime.session.opening.engine_probe import probe_engine

pytestmark = pytest.mark.integration
Drive, Nano = Callable[..., RunResult], Callable[..., RuntimeRequest]
TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SMALL: dict[str, Any] = {"hidden_size": 32, "vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2}


def config_of(name: str) -> Any:
    import transformers

    match name:
        case "GPTNeo":
            kinds = [[["global", "local"], 1]]
            return transformers.GPTNeoConfig(**SMALL, num_layers=2, num_heads=2, attention_types=kinds, max_position_embeddings=128)
        case "Bloom":
            return transformers.BloomConfig(**SMALL, n_layer=2, n_head=2)
        case "GptOss":
            return transformers.GptOssConfig(**TINY, num_local_experts=2, num_experts_per_tok=1)
        case "Llama":
            return transformers.LlamaConfig(**TINY)
        case _:
            return transformers.Gemma2Config(**TINY)


@pytest.mark.parametrize(
    ("name", "attention"), [("Gemma2", "eager"), ("GPTNeo", "eager"), ("Bloom", "eager"), ("GptOss", "eager"), ("Llama", "sdpa")]
)
def test_an_architecture_without_a_fused_kernel_trains_with_plain_attention(tmp_path: Path, name: str, attention: str) -> None:
    """The skeleton says which, the model with weights is built the same way and comes to a loss."""
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config_of(name)).save_pretrained(tmp_path)
    skeleton: Any = build_skeleton(str(tmp_path))
    assert skeleton.config._attn_implementation == attention
    assert all(parameter.device.type == "meta" for parameter in skeleton.parameters())
    model: Any = build_model(ModelSection(source=str(tmp_path)), 16, 0, "float32", False)
    assert model.config._attn_implementation == attention
    assert torch.isfinite(model(input_ids=torch.arange(3, 19)[None]).logits).all()


def test_a_key_that_deepspeed_cannot_read_is_the_doctors_and_trainings_refusal(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Exit 64 from both, naming the key, before a run folder is made and without a file beside it."""
    request = nano("maybe", deepspeed={"tensorboard": {"enabled": "maybe"}})
    error = error_of(bootstrap.examine_only(request, Settings.from_environment()))
    assert isinstance(error, RequestError)
    assert "tensorboard" in str(error)
    with pytest.raises(RequestError) as caught:
        drive(request)
    assert str(caught.value) == str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_model_folder_is_found_by_the_child(nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in a folder of its own; the request's path is seen from here."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config_of("Llama")).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    seen = probe_engine(nano("a", model={"source": "model"}), Settings.from_environment())
    assert seen is not None
    assert (seen.attention, seen.problems, seen.died) == ("sdpa", (), "")


def test_what_adapters_are_put_on_is_counted_and_what_they_leave_out_is_named(tmp_path: Path, nano: Nano) -> None:
    """Experts held as one parameter get none; a name that no layer has is refused with those that there are."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config_of("GptOss")).save_pretrained(tmp_path / "moe")
    wished = nano("a", model={"source": str(tmp_path / "moe"), "lora": {"rank": 2}})
    seen = probe_engine(wished, Settings.from_environment())
    assert seen is not None
    assert seen.num_trainable_parameters == 2 * 4 * 2 * (32 + 32), "two layers, four projections of 32 by 32"
    assert seen.left_out == ("model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.experts.down_proj")
    wrong = nano("a", model={"source": str(tmp_path / "moe"), "lora": {"target_modules": ["gate_proj"]}})
    problem = probe_engine(wrong, Settings.from_environment())
    assert problem is not None
    (found,) = problem.problems
    assert (found.field, found.bound) == ("model.lora.target_modules", "q_proj, k_proj, v_proj, o_proj, lm_head")


@pytest.mark.parametrize("part", [{"lora": {"target_modules": ["query"]}}, {"freeze": ["transformer.*"]}, {"freeze": ["*"]}])
def test_training_refuses_a_part_that_is_not_there_in_the_doctor_s_words(part: dict[str, Any], nano: Nano, drive: Drive) -> None:
    request = nano("a", model=part)
    error = error_of(bootstrap.examine_only(request, Settings.from_environment()))
    assert isinstance(error, RequestError)
    with pytest.raises(RequestError) as refused:
        drive(request)
    assert str(refused.value) == str(error)
    assert not Path(request.store, "a").exists()
