"""Facts of models without loading weights, and clear refusals of what cannot be used."""

import json
import struct
from pathlib import Path

import pytest

from mem_core.domain.errors import RequestError
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.folders import local_model_folder, tokenizer_identity
from mem_core.runtime.models.numbers import added_losses, read_model_numbers, trains_router_loss
from mem_core.runtime.models.presets import PRESETS
from mem_core.runtime.models.weights import read_safetensors_header

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def write_weights(path: Path, shapes: dict[str, list[int]], dtype: str = "BF16", width: int = 2) -> None:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = width
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_weights(
        tmp_path / "model.safetensors", {"model.embed_tokens.weight": [10, 4], "lm_head.weight": [10, 4], "model.norm.weight": [4]}
    )
    return tmp_path


@pytest.mark.parametrize(("name", "parameters"), [("llama-nano", 65_728), ("llama-tiny", 853_120), ("llama-small", 25_895_424)])
def test_presets_are_frozen(name: str, parameters: int) -> None:
    facts = describe_model(f"preset:{name}")
    assert (facts.num_parameters, facts.vocab_size, facts.stored_dtype) == (parameters, 384, "float32")
    assert facts.max_positions == PRESETS[name]["max_position_embeddings"]


def test_the_largest_preset_has_about_a_billion_parameters() -> None:
    assert 0.9e9 < describe_model("preset:llama-1b").num_parameters < 1.3e9
    assert len({describe_model(f"preset:{name}").fingerprint for name in PRESETS}) == len(PRESETS)


def test_a_folder_is_described_from_config_and_headers(folder: Path) -> None:
    facts = describe_model(str(folder))
    assert facts.num_parameters == 44, "tied embeddings count once"
    assert (facts.kind, facts.vocab_size, facts.max_positions, facts.stored_dtype) == ("llama", 10, 64, "bfloat16")
    assert describe_model(f"file://{folder}") == facts


def test_the_fingerprint_follows_config_and_tensor_tables(folder: Path) -> None:
    seen = {describe_model(str(folder)).fingerprint}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5.0}))
    seen.add(describe_model(str(folder)).fingerprint)
    write_weights(folder / "model.safetensors", {"model.embed_tokens.weight": [4, 10]})
    seen.add(describe_model(str(folder)).fingerprint)
    assert len(seen) == 3


def test_a_url_folder_is_fetched_once(folder: Path, tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(str(folder / "config.json"), "/mem-model/config.json")
    fs.put(str(folder / "model.safetensors"), "/mem-model/model.safetensors")
    fs.pipe("/mem-model/pytorch_model.bin", b"never fetched")
    try:
        facts = describe_model("memory://mem-model", tmp_path / "cache")
        assert facts == describe_model(str(folder))
        fetched = local_model_folder("memory://mem-model", tmp_path / "cache")
        assert sorted(path.name for path in fetched.iterdir()) == ["config.json", "model.safetensors"]
        assert [fetched] == [path for path in (tmp_path / "cache").iterdir() if path.is_dir()], "one folder, no leftovers"
    finally:
        fs.rm("/mem-model", recursive=True)


REFUSED = [
    ("preset:llama-huge", r"unknown preset \(got preset:llama-huge\); allowed: preset:llama-nano, preset:llama-tiny"),
    ("HuggingFaceTB/SmolLM2-135M", "no such folder.*not fetched by hub name"),
    ("{folder}/config.json", "is a file, not a model folder"),
]


@pytest.mark.parametrize(("source", "words"), REFUSED)
def test_sources_that_cannot_be_models(folder: Path, source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        describe_model(source.format(folder=folder))
    assert caught.value.field == "model.source"


def test_folders_that_cannot_be_models(folder: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(RequestError, match=words):
            describe_model(str(folder))

    weights.write_bytes(whole[:-1])
    refused(f"has {len(whole) - 1} bytes where its header asks for {len(whole)}")
    weights.write_bytes(b"\xff" * 100)
    refused("is not a safetensors file")
    weights.unlink()
    refused("has no weights")
    (folder / "pytorch_model.bin").touch()
    refused("pickled weights only, which can run code")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001.safetensors"}}')
    refused(r"weight files are missing: model-00001\.safetensors")
    config.write_text(json.dumps({**CONFIG, "architectures": ["BertForMaskedLM"]}))
    refused("BertForMaskedLM, not a causal language model")
    config.write_text("{")
    refused(r"config\.json cannot be read")
    config.unlink()
    refused(r"has no config\.json")


def test_a_header_that_lies_about_its_length_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(RequestError, match="header of 4611686018427387904 bytes in a file of 10"):
        read_safetensors_header(path)


def test_the_tokenizers_identity_follows_its_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_identity(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert tokenizer_identity(str(tmp_path)) == first
    (tmp_path / "chat_template.jinja").write_text("x")
    assert tokenizer_identity(str(tmp_path)) != first
    assert tokenizer_identity("preset:llama-nano") == tokenizer_identity("preset:llama-1b")


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({}, ()),
        ({"output_router_logits": False, "router_aux_loss_coef": 0.001}, ()),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.001}, ("output_router_logits: true",)),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, ()),
        ({"output_router_logits": True, "aux_loss_coef": 0.0}, ()),
        ({"output_router_logits": True}, ("output_router_logits: true",)),
        ({"text_config": {"output_router_logits": True}}, ("output_router_logits: true",)),
        ({"z_loss_coefficient": 0.1}, ("z_loss_coefficient: 0.1",)),
        ({"z_loss_coefficient": 0.0}, ()),
    ],
)
def test_what_a_model_adds_to_its_loss_is_read_from_its_configuration(config: dict, added: tuple[str, ...]) -> None:
    assert added_losses(config) == added


@pytest.mark.parametrize(
    ("config", "trains"),
    [
        ({"model_type": "mixtral", "output_router_logits": True, "router_aux_loss_coef": 0.001}, True),
        ({"model_type": "qwen3_moe", "output_router_logits": True}, True),
        ({"model_type": "mixtral", "output_router_logits": True, "router_aux_loss_coef": 0.0}, False),
        ({"model_type": "mixtral", "output_router_logits": False}, False),
        ({"model_type": "doge", "output_router_logits": True}, False),
        ({"model_type": "jetmoe", "output_router_logits": True}, False),
        ({"model_type": "mixtral", "output_router_logits": True, "text_config": {"output_router_logits": True}}, False),
        ({"model_type": "../x", "output_router_logits": True}, False),
    ],
)
def test_a_router_s_loss_is_trained_on_where_it_can_be_computed_row_by_row(config: dict, trains: bool) -> None:
    assert trains_router_loss(config) is trains


def test_the_doctor_s_numbers_say_whether_there_is_a_chat_template(folder: Path) -> None:
    assert read_model_numbers("preset:llama-nano").has_chat_template is False
    assert read_model_numbers(str(folder)).has_chat_template is False
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert read_model_numbers(str(folder)).has_chat_template is True
    (folder / "tokenizer_config.json").write_text("{")
    assert read_model_numbers(str(folder)).has_chat_template is False
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert read_model_numbers(str(folder)).has_chat_template is True
