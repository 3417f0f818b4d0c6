"""Request files and --set: YAML traps, duplicates, and messages that name field, value, bound and remedy (exit 64)."""

import io
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mem_core.domain.errors import RequestError
from mem_core.infrastructure.request import file as request_file
from mem_core.infrastructure.request.file import apply_overrides, build_request, load_request, parse_mapping, parse_value


def refused(values: dict[str, Any], *overrides: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        build_request(apply_overrides({"run_id": "demo", **values}, overrides))
    assert caught.value.exit_code == 64
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("3E4", 3e4),
        ("1.0", 1.0),
        (".5", 0.5),
        ("1_000_000", 1_000_000),
        ("007", 7),
        ("0x10", 16),
        ("-3", -3),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("null", None),
        ("", None),
        ("2024-01-02", "2024-01-02"),
        ("1:30", "1:30"),
        ("stdlib:", "stdlib:"),
        ("preset:llama-nano", "preset:llama-nano"),
        ("s3://bucket/p", "s3://bucket/p"),
        ('["stdlib:", a]', ["stdlib:", "a"]),
        ("{rank: 4}", {"rank": 4}),
        ('"123"', "123"),
    ],
)
def test_override_values_mean_what_they_look_like(text: str, value: Any) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_on_and_off_are_words_as_the_request_uses_them() -> None:
    """YAML 1.1 would make booleans of them and `compile: on` an error."""
    request = build_request(parse_mapping("run_id: a\nmodel: {compile: on, activation_checkpointing: off}\n"))
    assert (request.model.compile, request.model.activation_checkpointing) == ("on", "off")


def test_yaml_json_and_standard_input_give_the_same_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"run_id": "demo", "training": {"max_steps": 200, "learning_rate": 3e-4}}
    (tmp_path / "a.yaml").write_text("run_id: demo\ntraining:\n  max_steps: 200\n  learning_rate: 3e-4\n")
    (tmp_path / "a.json").write_text(json.dumps(values, indent="\t"))
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.yaml").read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO((tmp_path / "a.yaml").read_bytes())))
    requests = [load_request(str(tmp_path / name)) for name in ("a.yaml", "a.json", "bom.yaml")]
    assert requests == [build_request(values)] * 3
    assert load_request("-", ["training.max_steps=7"]).training.max_steps == 7


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("run_id: a\nrun_id: b\n", "given twice"),
        ("run_id: a\ntraining:\n  seed: 1\n  seed: 2\n", "line 4"),
        ('{"run_id": "a", "run_id": "b"}', "given twice"),
        ("run_id: [\n", "line"),
        ("", "empty"),
        ("- a\n", "list"),
        ("just text", "str"),
        ("run_id: a\n1: 2\n", "key must be text"),
        ("run_id: a\nx: &x [*x]\n", "JSON"),
        ("run_id: !!python/object/apply:os.system [true]\n", "constructor"),
        ("run_id: !!binary aGk=\n", "JSON"),
        ("a: " + "[" * 20_000, "parsed"),
        ("a: " + "[" * 150 + "]" * 150, "levels deep"),
        ('{"a": ' + "[" * 150 + "]" * 150 + "}", "levels deep"),
        ('{"a": "\\ud800"}', "half a character"),
    ],
)
def test_text_that_is_no_request_is_refused_with_the_place(text: str, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        parse_mapping(text)


def test_a_pipe_that_a_shell_holds_open_is_read_and_any_other_is_refused(tmp_path: Path) -> None:
    """`mem train <(make-request)` gives /dev/fd/N."""
    reading, writing = os.pipe()
    os.write(writing, b"run_id: demo\n")
    os.close(writing)
    assert load_request(f"/dev/fd/{reading}").run_id == "demo"
    os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match="it is a named pipe"):
        load_request(str(tmp_path / "pipe"))


def alias_bomb(item: str, levels: int = 9, aliases: int = 9) -> str:
    """Each level names the one below it several times: 400 bytes that stand for hundreds of millions of values."""
    lines = [f"a0: &a0 {item}"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * aliases)}]" for level in range(1, levels + 1)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        alias_bomb("x"),
        alias_bomb("x", levels=90, aliases=2),
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10)),
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}\n" for n in range(1, 40)),
        f"a: &a {'x' * 60_000}\nb: [{', '.join(['*a'] * 100)}]\n",
    ],
    ids=["nine of nine", "ninety of two", "merged", "mappings", "long text"],
)
def test_an_alias_bomb_is_refused_at_once(text: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(RequestError, match="aliases written out"):
        parse_mapping(text)
    with pytest.raises(RequestError, match="aliases written out"):
        parse_value(text)
    assert time.monotonic() - began_s < 5


def test_aliases_of_sane_size_stay_what_they_are() -> None:
    assert parse_mapping("a: &a [1, 2]\nb: *a\nc: {<<: &m {x: 1}, y: 2}\n") == {"a": [1, 2], "b": [1, 2], "c": {"x": 1, "y": 2}}
    assert len(parse_mapping(alias_bomb("x", levels=3))["a3"]) == 9


def test_files_that_are_no_request(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"run_id: caf\xe9\n")
    (tmp_path / "big.yaml").write_bytes(b"#" * (request_file.SIZE_LIMIT_BYTES + 1))
    for name, part in (("gone.yaml", "cannot be read"), ("latin.yaml", "not UTF-8"), ("big.yaml", "at most"), (".", "cannot be read")):
        with pytest.raises(RequestError, match=part):
            load_request(str(tmp_path / name))


def test_overrides_make_missing_and_null_sections_and_leave_the_input_alone() -> None:
    values: dict[str, Any] = {"run_id": "demo", "chaos": None}
    changed = apply_overrides(values, ["chaos.seed=3", "policy.planner.kind=rules", "deepspeed.a.b=[1]"])
    assert changed["chaos"] == {"seed": 3}
    assert changed["policy"]["planner"]["kind"] == "rules"
    assert changed["deepspeed"] == {"a": {"b": [1]}}
    assert values == {"run_id": "demo", "chaos": None}


@pytest.mark.parametrize("override", ["foo", "=3", "a..b=1", "a.b.=1", ".a=1", "a b=1", "data.train.0=x"])
def test_overrides_of_the_wrong_form(override: str) -> None:
    with pytest.raises(RequestError):
        apply_overrides({}, [override])


def test_an_override_through_a_value_is_refused() -> None:
    with pytest.raises(RequestError, match="not a section"):
        apply_overrides({"store": "./runs"}, ["store.path=x"])


@pytest.mark.parametrize(
    ("override", "field", "hint"),
    [
        ("training.max_step=3", "training.max_step", "training.max_steps"),
        ("trainin.max_steps=3", "trainin", "training"),
        ("max_steps=3", "max_steps", "training.max_steps"),
        ("zero_stage=3", "zero_stage", "parallel.zero_stage"),
        ("policy.planner.modle=x", "policy.planner.modle", "policy.planner.model"),
        ("model.lora.rnk=4", "model.lora.rnk", "model.lora.rank"),
    ],
)
def test_unknown_keys_name_the_closest_known_one(override: str, field: str, hint: str) -> None:
    error = refused({}, override)
    assert error.field == field
    assert f"Did you mean {hint}?" in error.remedy


@pytest.mark.parametrize(
    ("override", "field", "value", "bound"),
    [
        ("training.max_steps=0", "training.max_steps", "0", ">= 1"),
        ("training.learning_rate=11", "training.learning_rate", "11", "> 0 and <= 10"),
        ("training.learning_rate=abc", "training.learning_rate", "'abc'", "> 0 and <= 10"),
        ("training.learning_rate=.nan", "training.learning_rate", "nan", "> 0 and <= 10"),
        ("training.learning_rate=1e999", "training.learning_rate", "inf", "> 0 and <= 10"),
        ("training.max_steps=1.5", "training.max_steps", "1.5", ">= 1"),
        ("parallel.zero_stage=4", "parallel.zero_stage", "4", "0, 1, 2 or 3"),
        ("device=tpu", "device", "'tpu'", "auto, cpu or cuda"),
        ("memory.micro_batch_size=x", "memory.micro_batch_size", "'x'", "a whole number, auto"),
        ("run_id=Hello", "run_id", "'Hello'", "^[a-z0-9][a-z0-9-]{0,63}$"),
        ("run_id=../up", "run_id", "'../up'", "^[a-z0-9][a-z0-9-]{0,63}$"),
        ("training.betas=[0.9, 1.5]", "training.betas.1", "1.5", ""),
        ("data.sequence_length=1", "data.sequence_length", "1", ">= 2 and <= 1048576"),
        ("resilience.segment_deadline_s=-1", "resilience.segment_deadline_s", "-1", "a number, auto"),
    ],
)
def test_out_of_bounds_values_name_field_value_and_bound(override: str, field: str, value: str, bound: str) -> None:
    error = refused({}, override)
    assert (error.field, error.value, error.bound) == (field, value, bound)


@pytest.mark.parametrize(
    "override",
    [
        "training.max_steps=true", "memory.micro_batch_size=true", "memory.budget=true", "parallel.zero_stage=true", "chaos.every_s=true",
        "checkpoint.keep_every_steps=true", "data.validation=true", "training.betas=[false, 0.9]",
    ],
)  # fmt: skip
def test_true_is_not_the_number_one(override: str) -> None:
    refused({}, override)


def test_a_batch_that_ranks_cannot_divide_names_sizes_that_would_fit() -> None:
    error = refused({}, "training.global_batch_size=7", "parallel.num_ranks=2")
    assert error.field == "training.global_batch_size"
    assert "6 or 8" in error.remedy


def test_a_micro_batch_that_does_not_divide_names_those_that_do() -> None:
    error = refused({}, "memory.micro_batch_size=3")
    assert error.field == "memory.micro_batch_size"
    assert "[1, 2, 4, 8]" in error.remedy


def test_all_problems_are_told_at_once() -> None:
    message = str(refused({}, "training.seed=-1", "data.sequence_length=1", "nonsense=2"))
    assert all(part in message for part in ("training.seed", "data.sequence_length", "nonsense"))


@pytest.mark.parametrize("name", ["api_key", "s3_secret", "token", "password"])
def test_a_secret_written_into_a_request_is_not_echoed(name: str) -> None:
    assert "hunter2" not in str(refused({"policy": {"planner": {name: "hunter2"}}}))


def test_deepspeed_keys_that_mem_owns_or_that_are_no_json_are_refused() -> None:
    assert "train_batch_size" in str(refused({"deepspeed": {"train_batch_size": 1}}))
    assert "JSON" in str(refused({"deepspeed": {"a": float("nan")}}))


def test_a_missing_run_id_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        build_request({})
    assert caught.value.field == "run_id"
