"""The cache's key holds all that decides ids, and a run is told which part of its encoding is another one."""

import json
import shutil
from pathlib import Path

import pytest

from mem_core.core.run.record import RunRecord
from mem_core.domain.errors import DataError, RequestError
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import DataSection, RuntimeRequest
from mem_core.runtime.data.encoding.tokenize_process import prepare_here
from mem_core.runtime.data.values import PreparedData, PrepareJob
from mem_core.runtime.models.build import load_tokenizer
from mem_core.runtime.models.encoding import differences, encoding_of, rules_of, tokenizer_files
from mem_core.runtime.models.own_tokenizer import disagreement
from mem_core.runtime.session.opening.refusals import refuse_other_data
from mem_core.testing.tokenizer_folders import byte_level_bpe, tokenizer_folder


def prepare(source: Path | str, path: Path, *, rules: int = 3) -> PreparedData:
    data = DataSection(train=(str(path),), validation=None, sequence_length=16)
    cache = path.parent / "cache"
    job = PrepareJob(data=data, tokenizer_source=str(source), vocab_size=None, cache_dir=cache, parent_pid=0, rules=rules)
    return prepare_here(job, lambda progress: None)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x 10 y 20 z 30 " * i}) + "\n" for i in range(1, 6)))
    return path


def test_equal_tokenizer_files_under_another_class_have_shards_of_their_own(tmp_path: Path, rows: Path) -> None:
    """Qwen2's class cuts numbers into digits, Phi3 takes the file as it stands; whichever is prepared first, each gets its own ids."""
    qwen, phi = (tokenizer_folder(tmp_path / kind, byte_level_bpe(), kind) for kind in ("qwen2", "phi3"))
    assert (qwen / "tokenizer.json").read_bytes() == (phi / "tokenizer.json").read_bytes()
    one, other = prepare(qwen, rows), prepare(phi, rows)
    assert not other.from_cache
    assert one.fingerprint != other.fingerprint
    assert one.num_tokens > other.num_tokens
    assert (one.encoding["class"], other.encoding["class"]) == ("Qwen2Tokenizer", "TokenizersBackend")
    assert prepare(qwen, rows).from_cache


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("config.json", '{"model_type": "phi3"}', "config.json model_type"),
        ("config.json", '{"model_type": "llama", "transformers_version": "4.57.2"}', "config.json transformers_version"),
        ("tokenizer_config.json", '{"tokenizer_class": "GPT2Tokenizer"}', "file tokenizer_config.json"),
        ("vocab.json", "{}", "file vocab.json"),
        ("tokenizer.other.json", "{}", "file tokenizer.other.json"),
        ("spiece.model", "x", "file spiece.model"),
        ("qwen.tiktoken", "x", "file qwen.tiktoken"),
    ],
)
def test_every_file_and_field_that_may_choose_ids_is_a_part(tmp_path: Path, name: str, content: str, part: str) -> None:
    folder = tokenizer_folder(tmp_path / "model", byte_level_bpe())
    before = encoding_of(str(folder))
    (folder / name).write_text(content)
    assert [found.split(":")[0] for found in differences(before, encoding_of(str(folder)))][-1:] == [part]


def test_what_cannot_choose_ids_is_no_part(tmp_path: Path) -> None:
    """Weights, notes for people, and chat templates as long as nothing is rendered by one."""
    folder = tokenizer_folder(tmp_path / "model", byte_level_bpe())
    before = encoding_of(str(folder))
    for name in ("README.md", "generation_config.json", "model.safetensors", "chat_template.jinja"):
        (folder / name).write_text("{}")
    assert encoding_of(str(folder)) == before
    assert "file chat_template.jinja" in encoding_of(str(folder), chat=True)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    assert "additional_chat_templates/tool_use.jinja" in tokenizer_files(folder)
    assert {"transformers", "tokenizers", "jinja2"} <= encoding_of(str(folder), chat=True).keys()
    assert "jinja2" not in before


def record(prepared: PreparedData, source: Path | str, **values: object) -> RunRecord:
    raw = {"run_id": "run", "model": {"source": str(source)}}
    return RunRecord(
        run_id="run", request=RuntimeRequest.model_validate(raw), device="cpu", dtype="float32",
        default_plan=MemoryPlan(micro_batch_rows=1),
        data_fingerprint=prepared.fingerprint, model_fingerprint="m", encoding=prepared.encoding,
    ).model_copy(update=values)  # fmt: skip


def test_another_encoding_is_named_and_never_called_changed_data(tmp_path: Path, rows: Path) -> None:
    folder = tokenizer_folder(tmp_path / "model", byte_level_bpe(), "phi3")
    born = record(prepare(folder, rows), folder)
    refuse_other_data(born, prepare(folder, rows), "")
    shutil.copytree(folder, tmp_path / "other")
    tokenizer_folder(tmp_path / "other", byte_level_bpe(), "qwen2")
    with pytest.raises(RequestError, match=r"class: TokenizersBackend at birth, Qwen2Tokenizer now") as caught:
        refuse_other_data(born, prepare(tmp_path / "other", rows), "")
    assert 'config.json model_type: "phi3" at birth, "qwen2" now' in str(caught.value)
    assert "the encoding of run run has changed" in str(caught.value)
    older = record(prepare(folder, rows), folder, encoding={**born.encoding, "transformers": "5.0.0"})
    with pytest.raises(RequestError, match=r"transformers: 5\.0\.0 at birth, .* now"):
        refuse_other_data(older, prepare(folder, rows), "")
    rows.write_text(rows.read_text() + '{"text": "one more row of data"}\n')
    with pytest.raises(DataError, match="the data of run run has changed since it was born"):
        refuse_other_data(born, prepare(folder, rows), "")


def test_a_run_whose_record_names_no_encoding_goes_on_under_the_first_rules(tmp_path: Path, rows: Path) -> None:
    """Its fingerprint is the one it was born with, for presets and folders; what changed there cannot be told from its record."""
    folder = tokenizer_folder(tmp_path / "model", byte_level_bpe())
    for source in ("preset:llama-nano", folder):
        old = prepare(source, rows, rules=1)
        assert old.encoding == {}
        born = record(old, source)
        assert rules_of(born.encoding) == 1
        refuse_other_data(born, prepare(source, rows, rules=rules_of(born.encoding)), "")
        assert prepare(source, rows).fingerprint != old.fingerprint
        assert rules_of(prepare(source, rows).encoding) == 3
    born = record(prepare(folder, rows, rules=1), folder)
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match="the data, or a file of its tokenizer, of run run"):
        refuse_other_data(born, prepare(folder, rows, rules=1), "")


def test_the_first_rules_name_the_data_as_they_did(tmp_path: Path) -> None:
    """A fingerprint that was recorded by the version before records named encodings."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "hello world, this is a row"}\n')
    assert prepare("preset:llama-nano", path, rules=1).fingerprint == FIRST_RULES_FINGERPRINT


FIRST_RULES_FINGERPRINT = "ff3e857d3c24fbb8d2cdb35165cb2cb5e0d989545e5e66683e715f21047c2437"


def test_a_class_that_disagrees_with_the_folders_own_file_is_told(tmp_path: Path, rows: Path) -> None:
    qwen, phi = (tokenizer_folder(tmp_path / kind, byte_level_bpe(), kind) for kind in ("qwen2", "phi3"))
    assert disagreement(load_tokenizer(str(phi)), phi) == ""
    told = disagreement(load_tokenizer(str(qwen)), qwen)
    assert "tokenizer.json cuts 'x 10 y 20 z 300' into x Ġ10 Ġy" in told
    assert "Qwen2Tokenizer, which transformers chooses for this model, into x Ġ 1 0" in told
    assert told in prepare(qwen, rows).notes
    assert prepare(phi, rows).notes == ()


def test_where_a_relative_folder_stands_does_not_choose_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers compares the text of the path with names on the hub."""
    tokenizer_folder(tmp_path / "deepseek-ai" / "deepseek-coder-1", byte_level_bpe(), "qwen2")
    monkeypatch.chdir(tmp_path)
    assert type(load_tokenizer("deepseek-ai/deepseek-coder-1")).__name__ == "Qwen2Tokenizer"
