"""Model folders that somebody damaged, mistook or made to do harm: refused with exit 64 and words, never a crash, never a look outside."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.errors import RequestError
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.models.numbers import read_model_numbers
from mem_core.runtime.models.weights import INDEX_NAME, is_plain_name

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
TENSOR = {"dtype": "F32", "shape": [10, 4], "data_offsets": [0, 160]}


def safetensors(header: Any, data_bytes: int = 160) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


WEIGHTS = safetensors({"model.embed_tokens.weight": TENSOR})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "m" / "model.safetensors").write_bytes(WEIGHTS)
    return tmp_path / "m"


def refusal(folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        read_model_numbers(str(folder))
    assert caught.value.field == "model.source"
    assert caught.value.remedy
    return str(caught.value)


@pytest.fixture
def sharded(folder: Path) -> Callable[..., Path]:
    """A folder whose weights are named by an index: `sharded(index)`, `sharded(raw=bytes)`."""
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")

    def make(index: Any = None, raw: bytes | None = None) -> Path:
        (folder / INDEX_NAME).write_bytes(json.dumps(index).encode() if raw is None else raw)
        return folder

    return make


def test_a_whole_index_is_followed(sharded: Callable[..., Path]) -> None:
    folder = sharded({"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-1.safetensors"}})
    assert describe_model(str(folder)).num_parameters == 40


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "/etc/passwd.safetensors", "sub/x.safetensors", "./model-1.safetensors", "a//b.safetensors",
     "..", ".", "", "x\0.safetensors", "back\\slash.safetensors", "model.bin", "x" * 300 + ".safetensors", 5, None, ["a"], {"a": 1}, True],
)  # fmt: skip
def test_an_index_names_plain_files_of_its_own_folder_only(sharded: Callable[..., Path], name: Any) -> None:
    folder = sharded({"metadata": {}, "weight_map": {"a": "model-1.safetensors", "model.embed_tokens.weight": name}})
    (folder.parent / "outside.safetensors").write_bytes(WEIGHTS)
    words = refusal(folder)
    assert "no file of the folder itself" in words
    assert "root:" not in words


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "a", "ä.json", "...", "x" * 255])
def test_plain_names_are_plain(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"{}", b"[]", b"5", b'"x"', b"null", b"\xff\xfe\x00", b"[" * 100_000, b'{"weight_map": {}}', b'{"weight_map": []}',
     b'{"weight_map": 5}', b'{"weight_map": null}', b'{"weight_map": {"a": "model-1.safetensors"}}',
     b'{"metadata": 5, "weight_map": {"a": "model-1.safetensors"}}', b'{"weight_map": {"a": "model-2.safetensors"}}',
     b'{"metadata": {}, "weight_map": {"\\ud800": "model-1.safetensors"}}'],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(sharded: Callable[..., Path], raw: bytes) -> None:
    assert "index" in refusal(sharded(raw=raw)) or raw.endswith(b'2.safetensors"}}')


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b"5", b"null", b"[" * 50_000, {"a": 5}, {"a": []}, {"a": {}}, {"a": {**TENSOR, "shape": "many"}},
     {"a": {**TENSOR, "shape": [-10, -4]}}, {"a": {**TENSOR, "shape": [10.0, 4]}}, {"a": {**TENSOR, "shape": [True, 40]}},
     {"a": {**TENSOR, "shape": [10, 5]}}, {"a": {**TENSOR, "data_offsets": [0]}}, {"a": {**TENSOR, "data_offsets": [160, 0]}},
     {"a": {**TENSOR, "data_offsets": "0-160"}}, {"a": {**TENSOR, "data_offsets": [0, 10**30]}}, {"a": {**TENSOR, "data_offsets": None}},
     {"a": TENSOR, "b": {**TENSOR, "data_offsets": [80, 240]}}, {"a": {**TENSOR, "dtype": None, "shape": None}}, {"__metadata__": {}}],
)  # fmt: skip
def test_headers_that_lie_are_refused(folder: Path, header: Any) -> None:
    (folder / "model.safetensors").write_bytes(safetensors(header))
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": 5}, "architectures must be a list"),
        ({"architectures": [5]}, "architectures must be a list"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"vocab_size": [1] * 4 + [None, {}]}, "vocab_size"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"intermediate_size": "x"}, "intermediate_size"),
        ({"max_position_embeddings": 0.5}, "max_position_embeddings is 0.5"),
        ({"text_config": 5}, "text_config is no mapping"),
        ({"text_config": {}}, "no vocab_size"),
        ({"text_config": {**CONFIG, "hidden_size": []}}, "no hidden_size"),
        ({"model_type": 5}, "model_type must be a name"),
        ({"model_type": "nosuch"}, "knows no causal language model of model_type 'nosuch'"),
        ({"model_type": "nosuch", "auto_map": {"AutoConfig": "evil.Config"}}, "code of its own, which MEM never runs"),
        ({"model_type": None, "auto_map": {"AutoConfig": "evil.Config"}}, "code of its own, which MEM never runs"),
        ({"model_type": "clip"}, "model_type 'clip'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised (gptq), which cannot be trained"),
        ({"quantization_config": 5}, "quantised"),
        ({"compression_config": {}}, "quantised"),
    ],
)
def test_a_configuration_that_would_stop_training_is_refused_by_name(folder: Path, change: dict[str, Any], words: str) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert words in refusal(folder)


@pytest.mark.parametrize("raw", [b"", b"[]", b"5", b"\xff" * 10, b"[" * 100_000, b'{"a":' * 200 + b"1" + b"}" * 200, b'{"a": "\\udc00"}'])
def test_a_config_json_that_is_none_is_refused(folder: Path, raw: bytes) -> None:
    (folder / "config.json").write_bytes(raw)
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX_NAME, "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_pipe_or_folder_where_a_file_belongs_never_hangs(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    if kind == "folder" and name in ("tokenizer.json", "generation_config.json", INDEX_NAME):
        assert describe_model(str(folder)).vocab_size == 10, "nothing reads it here"
    else:
        assert name in refusal(folder)


def test_weights_of_the_usual_name_come_before_an_index_as_when_they_are_loaded(folder: Path) -> None:
    (folder / INDEX_NAME).write_text("{")
    with pytest.raises(RequestError, match="index"):  # the record of what a run was born with covers it all the same
        describe_model(str(folder))
    (folder / INDEX_NAME).unlink()
    (folder / "consolidated.safetensors").write_bytes(WEIGHTS.replace(b"model.embed", b"other.embed"))
    assert describe_model(str(folder)).num_parameters == 40, "a second copy of the weights is not counted"


def test_numbers_given_a_layer_count_by_the_largest(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": [8, 16]}))
    assert read_model_numbers(str(folder)).intermediate_size == 16
