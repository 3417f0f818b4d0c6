"""Adapters and frozen parameters on a real small model: which layers, the same draw everywhere, and refusals that name what there is."""

import hashlib
from typing import Any

import pytest
import torch

from mem_core.domain.errors import RequestError
from mem_core.domain.request import LoraSection, ModelSection, RuntimeRequest
from mem_core.runtime.deepspeed.trainable import EVERY_PARAMETER, Adapters, AllBut, frozen_digest, trainable_of
from mem_core.runtime.models.adapters import adapted_layers, adapter_config, adapter_tensors, left_out_experts, put_adapters
from mem_core.runtime.models.build import build_model, build_skeleton

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def nano(seed: int = 0, dtype: str = "float32") -> torch.nn.Module:
    return build_model(ModelSection(), 128, seed, dtype, activation_checkpointing=False)


def trained_bits(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: parameter.detach().numpy().tobytes() for name, parameter in EVERY_PARAMETER.named(module)}


def parsed(**model: Any) -> RuntimeRequest:
    return RuntimeRequest.model_validate({"run_id": "a", "model": model})


def test_a_request_trains_everything_all_but_some_or_adapters() -> None:
    assert trainable_of(parsed()) == EVERY_PARAMETER
    assert trainable_of(parsed(freeze=["a.*"])) == AllBut(("a.*",))
    assert trainable_of(parsed(lora={"rank": 4})) == Adapters(LoraSection(rank=4), 0)
    assert [trainable_of(parsed(**part)).has_base for part in ({}, {"freeze": ["a"]}, {"lora": {}})] == [False, True, True]


def test_auto_adapts_every_linear_layer_but_the_output_head() -> None:
    module = put_adapters(nano().requires_grad_(False), LoraSection(rank=4), 0)
    trained = EVERY_PARAMETER.shapes(module)
    assert {name.split(".")[-4] for name in trained} == set(LAYERS)
    assert {shape[0] if "lora_A" in name else shape[1] for name, shape in trained.items()} == {4}
    assert not any("lm_head" in name or "embed" in name for name in trained)


def test_named_layers_are_adapted_by_name_or_ending() -> None:
    module = nano()
    assert adapted_layers(module, LoraSection(target_modules=("self_attn.q_proj", "model.layers.0.mlp.up_proj"))) == (
        "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj",
    )  # fmt: skip
    assert set(adapter_config(module, LoraSection(target_modules=("q_proj",))).target_modules) == {"q_proj"}


def test_endings_that_would_choose_more_are_written_out() -> None:
    """peft chooses by the end of a name as well: `q_proj` alone would take a layer that was not asked for."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.ModuleDict({"x": torch.nn.Linear(2, 2)}), torch.nn.ModuleDict({"x": torch.nn.Linear(2, 2)})

    assert set(adapter_config(Two(), LoraSection(target_modules=("first.x",))).target_modules) == {"first.x"}
    assert set(adapter_config(Two(), LoraSection(target_modules=("first.x", "second.x"))).target_modules) == {"x"}


def test_names_that_no_layer_has_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(RequestError) as refused:
        adapted_layers(nano(), LoraSection(target_modules=("q_proj", "query_key_value", "embed_tokens")))
    assert refused.value.exit_code == 64
    assert refused.value.field == "model.lora.target_modules"
    assert "query_key_value, embed_tokens" in str(refused.value)
    for name in (*LAYERS, "lm_head"):
        assert name in refused.value.bound
    with pytest.raises(RequestError, match="shares its weights with the embedding"):
        adapted_layers(nano(), LoraSection(target_modules=("lm_head",)))


def test_a_seed_draws_the_same_adapters_on_any_base_and_leaves_the_random_state_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, other, another = Adapters(LoraSection(), 5), Adapters(LoraSection(), 5), Adapters(LoraSection(), 6)
    bits = trained_bits(one.choose(nano(seed=0)))
    torch.manual_seed(2)
    assert bits == trained_bits(other.choose(nano(seed=9))) != trained_bits(another.choose(nano()))
    torch.manual_seed(1)
    one.choose(nano())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_adapters_change_nothing_at_first_and_have_the_model_s_number_format() -> None:
    tokens = torch.arange(3, 35)[None]
    plain, adapted = nano(), Adapters(LoraSection(dropout=0.5), 0).choose(nano())
    assert torch.equal(plain(input_ids=tokens).logits, adapted(input_ids=tokens).logits)
    half = Adapters(LoraSection(), 0).choose(nano(dtype="bfloat16"))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_counting_what_trains_needs_no_weights() -> None:
    skeleton = Adapters(LoraSection(rank=4), 0).choose(build_skeleton("preset:llama-nano"))
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert EVERY_PARAMETER.shapes(skeleton) == EVERY_PARAMETER.shapes(Adapters(LoraSection(rank=4), 0).choose(nano()))


def test_names_in_the_folder_are_those_that_peft_looks_for() -> None:
    named = adapter_tensors({"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(1)})
    assert list(named) == ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]


def test_experts_of_three_dimensions_are_named_once() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Parameter(torch.zeros(2, 3, 4))

    assert left_out_experts(torch.nn.ModuleList([Layer(), Layer()])) == ("*.experts",)
    assert left_out_experts(nano()) == ()


def test_frozen_patterns_leave_the_rest_to_train() -> None:
    trainable, module = AllBut(("model.embed_tokens.*", "*.mlp.*_proj.weight")), nano()
    every = {name for name, _ in module.named_parameters()}
    trained = set(trainable.shapes(trainable.choose(module)))
    assert every - trained == {name for name in every if ".mlp." in name or "embed" in name}
    assert trainable.frozen_names(module) == (every - trained) | {"lm_head.weight"}, "a tied weight has two names"
    tied = AllBut(("lm_head.weight",)).choose(nano())
    assert not tied.get_parameter("model.embed_tokens.weight").requires_grad


def test_patterns_that_match_nothing_or_everything_are_refused() -> None:
    with pytest.raises(RequestError) as refused:
        AllBut(("*.mlp.*", "model.layers.9.*")).choose(nano())
    assert (refused.value.exit_code, refused.value.field, refused.value.value) == (64, "model.freeze", "model.layers.9.*")
    assert "model.embed_tokens.weight" in refused.value.bound
    with pytest.raises(RequestError, match="nothing to train"):
        AllBut(("*",)).choose(nano())


def test_frozen_beside_adapters_says_nothing_and_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.freeze has no meaning beside model\.lora"):
        parsed(lora={}, freeze=["*.mlp.*"])


def test_the_fingerprint_of_the_base_changes_with_its_bits_names_and_format_alone() -> None:
    """The recipe written out; adapters are no part of it, so that training does not move it."""
    tensor = torch.arange(4, dtype=torch.float32).reshape(2, 2)
    expected = hashlib.sha256(b"a:(2, 2):torch.float32;" + tensor.numpy().tobytes()).hexdigest()
    assert frozen_digest([("a", tensor)]) == expected
    assert len({expected, frozen_digest([("b", tensor)]), frozen_digest([("a", tensor.bfloat16())]), frozen_digest([("a", -tensor)])}) == 4
    adapters = Adapters(LoraSection(), 0)
    module = adapters.choose(nano())
    before = adapters.base_digest(module)
    for _, parameter in adapters.named(module):
        parameter.data += 1
    assert adapters.base_digest(module) == before != adapters.base_digest(adapters.choose(nano(seed=1)))
    assert EVERY_PARAMETER.base_digest(EVERY_PARAMETER.choose(nano())) == ""
