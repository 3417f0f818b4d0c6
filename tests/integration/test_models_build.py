"""Real models: same bits from the same seed, Hugging Face round trip, tied weights, refusals."""

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mem_core.domain.errors import InternalError, RequestError
from mem_core.domain.request import ModelSection
from mem_core.runtime.models.build import (
    build_model,
    clean_name,
    load_tokenizer,
    parameter_names,
    recompute_activations,
    recomputes_activations,
    save_pretrained_folder,
)
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.numbers import added_losses

NANO = ModelSection(source="preset:llama-nano")


def build(model: ModelSection = NANO, seed: int = 0, dtype: str = "float32", checkpointing: bool = False) -> torch.nn.Module:
    return build_model(model, 128, seed, dtype, checkpointing)


def same_bits(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 67).reshape(2, 32)
    logits = model(input_ids=ids).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_the_seed_alone_decides_a_presets_weights() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build()
    assert torch.equal(torch.random.get_rng_state(), before), "the global random state is left alone"
    torch.manual_seed(2)
    assert same_bits(first, build())
    assert not same_bits(first, build(seed=1))


@pytest.mark.parametrize("name", ["llama-nano", "llama-tiny"])
def test_facts_agree_with_the_built_model(name: str) -> None:
    model = ModelSection(source=f"preset:{name}")
    names = parameter_names(build(model))
    assert sum(math.prod(shape) for shape in names.values()) == describe_model(model.source).num_parameters
    assert list(names) == sorted(names)
    assert "lm_head.weight" not in names, "tied weights appear once"


def test_models_are_ready_to_train() -> None:
    model = build()
    assert model.training
    assert model.config.use_cache is False
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert 5 < loss_of(model).item() < 7, "near log(384) before training"
    assert {parameter.dtype for parameter in build(dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_activation_checkpointing_changes_no_bit_of_the_gradient() -> None:
    plain, saving = build(), build(checkpointing=True)
    assert (recomputes_activations(plain), recomputes_activations(saving)) == (False, True)
    for model in (plain, saving):
        loss_of(model).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), saving.parameters(), strict=True))


def test_a_model_that_is_switched_to_and_fro_collects_no_hooks() -> None:
    module: Any = build()
    embedding = module.get_input_embeddings()
    for wanted in (True, True, False, True, False):
        recompute_activations(module, wanted)
        assert len(embedding._forward_hooks) == int(wanted)


def test_recomputing_is_switched_under_the_name_that_a_release_has_for_it() -> None:
    """Up to 5.18 at least transformers called it gradient checkpointing; the newer words come first, since the older ones warn."""

    class Older:
        is_gradient_checkpointing = False

        def gradient_checkpointing_enable(self) -> None:
            self.is_gradient_checkpointing = True

        def gradient_checkpointing_disable(self) -> None:
            self.is_gradient_checkpointing = False

    for module in (Older(), build()):
        states = []
        for wanted in (True, False):
            recompute_activations(module, wanted)
            states.append(recomputes_activations(module))
        assert states == [True, False]
    assert not recomputes_activations(object())


def test_wrapper_prefixes_are_removed() -> None:
    assert clean_name("module._orig_mod.model.norm.weight") == "model.norm.weight"
    assert clean_name("_orig_mod.model.layers.0._orig_mod.mlp.weight") == "model.layers.0.mlp.weight"
    assert clean_name("module.module.a") == "a"
    wrapped = torch.nn.ModuleDict({"module": torch.compile(build(), backend="eager")})
    assert parameter_names(wrapped) == parameter_names(build())


def test_an_export_loads_with_transformers_bit_for_bit(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = build(seed=3)
    folder = tmp_path / "export" / "hf"
    save_pretrained_folder(NANO, dict(model.named_parameters()), folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert same_bits(model, loaded)
    assert torch.equal(loss_of(model), loss_of(loaded.train()))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("round trip", add_special_tokens=False).input_ids) == "round trip"
    assert [path.name for path in folder.parent.iterdir()] == ["hf"], "no leftovers"

    from_folder = ModelSection(source=str(folder))
    assert describe_model(str(folder)).num_parameters == 65_728
    assert same_bits(model, build(from_folder, seed=99)), "a folder's weights do not depend on the seed"
    save_pretrained_folder(from_folder, dict(model.named_parameters()), folder.with_name("again"))
    assert same_bits(model, AutoModelForCausalLM.from_pretrained(folder.with_name("again")))


def test_an_export_of_other_tensors_is_refused(tmp_path: Path) -> None:
    state = dict(build().named_parameters())
    state["model.norm.weight"] = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(InternalError, match=r"1 tensors do not fit the model: model.norm.weight \(3,\) for \(64,\)"):
        save_pretrained_folder(NANO, state, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "m"
    save_pretrained_folder(NANO, dict(build().named_parameters()), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=r"1 weights are missing or of another shape: model\.norm\.weight"):
        build(ModelSection(source=str(folder)))


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"at most 2048 tokens \(got 4096\)"):
        build_model(NANO, 4_096, 0, "float32", False)
    with pytest.raises(RequestError, match="unknown number format"):
        build(dtype="int8")
    with pytest.raises(RequestError, match="no tokenizer files"):
        load_tokenizer(str(tmp_path))


def test_no_causal_language_model_adds_to_its_loss_unless_its_configuration_says_so() -> None:
    """What is read before anything starts is config.json alone: a default that is on would be missed there."""
    from transformers import CONFIG_MAPPING, BambaConfig, JetMoeConfig, MixtralConfig, Qwen2MoeConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    on: dict[str, tuple[str, ...]] = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.suppress(Exception):  # a configuration that has no defaults of its own
            on[kind] = added_losses(CONFIG_MAPPING[kind]().to_dict())
    assert {kind: added for kind, added in on.items() if added} == {}
    assert len(on) > 100
    for config in (MixtralConfig, Qwen2MoeConfig, JetMoeConfig):
        assert added_losses(config(output_router_logits=True).to_dict()) == ("output_router_logits: true",)
    assert added_losses(BambaConfig(z_loss_coefficient=0.5).to_dict()) == ("z_loss_coefficient: 0.5",)
