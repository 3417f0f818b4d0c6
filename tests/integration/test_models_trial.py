"""What only shows when a model is built: found once, before any rank, with exit 64; and what the doctor passes, a run trains."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mem_core import bootstrap
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.domain.errors import EnvironmentUnfit, MemError, RequestError
from mem_core.domain.request import ModelSection, RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.models import trial as trial_module
from mem_core.runtime.models.build import build_model, save_pretrained_folder
from mem_core.runtime.models.trial import Trial, try_model
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.session.opening.prepare_service import try_model as try_in_child

NANO = ModelSection(source="preset:llama-nano")
WORDS = {"[UNK]": 0, "a": 1, "b": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a fast tokenizer and a generation config, as they are published."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("models") / "whole"
    save_pretrained_folder(NANO, dict(build_model(NANO, 128, 0, "float32", False).named_parameters()), folder)
    for path in folder.glob("*token*"):
        path.unlink()
    Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "model")
    return tmp_path / "model"


def tried(folder: Path, **more: Any) -> None:
    try_model(Trial(model=ModelSection(source=str(folder)), sequence_length=128, dtype="float32", **more))


def passes(folder: Path) -> bool:
    """Whether nothing refuses it."""
    tried(folder)
    return True


def edit(folder: Path, name: str, **changes: Any) -> None:
    content = json.loads((folder / name).read_bytes())
    (folder / name).write_text(json.dumps({**content, **changes}))


def spoil_weight(folder: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_whole_folder_passes_and_the_large_way_passes_it_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes(folder)
    monkeypatch.setattr(trial_module, "BUILT_WHOLE_BYTES", 0)
    assert passes(folder)


BROKEN: dict[str, Callable[[Path], object]] = {
    "cut tokenizer": lambda folder: os.truncate(folder / "tokenizer.json", 50),
    "tokenizer of another shape": lambda folder: edit(folder, "tokenizer.json", model={"type": "WordLevel", "vocab": 5}),
    "tokenizer_config that is a list": lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
    "generation_config that is text": lambda folder: (folder / "generation_config.json").write_text("warm"),
    "NaN weight": lambda folder: spoil_weight(folder, float("nan")),
    "infinite weight": lambda folder: spoil_weight(folder, float("inf")),
    "heads that do not divide": lambda folder: edit(folder, "config.json", num_attention_heads=5, num_key_value_heads=5, head_dim=None),
    "another hidden size": lambda folder: edit(folder, "config.json", hidden_size=32),
    "a setting of another kind": lambda folder: edit(folder, "config.json", rope_parameters="yes"),
    "an activation that is none": lambda folder: edit(folder, "config.json", hidden_act="nosuch"),
    "more layers than weights": lambda folder: edit(folder, "config.json", num_hidden_layers=2),
    "dropout in words": lambda folder: edit(folder, "config.json", attention_dropout="little", rms_norm_eps="small"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_what_would_end_each_rank_ends_the_trial(folder: Path, damage: str) -> None:
    BROKEN[damage](folder)
    with pytest.raises(RequestError) as caught:
        tried(folder)
    assert caught.value.field == "model.source"
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("damage", ["NaN weight", "cut tokenizer"])
def test_a_run_of_such_a_model_ends_at_once_with_its_own_words(
    folder: Path, damage: str, nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path
) -> None:
    """Neither three restarts nor a record of a run that never was; mended, the same command trains."""
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    BROKEN[damage](folder)
    request = nano("run", model={"source": str(folder)}, training={"max_steps": 4, "warmup_steps": 1}, data={"sequence_length": 32})
    with pytest.raises(RequestError, match="model.norm.weight" if "NaN" in damage else "tokenizer"):
        drive(request)
    assert not (tmp_path / "run" / "run.json").exists()
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    assert drive(request).status == "completed"


def test_the_doctor_tries_it_too(folder: Path, nano: Callable[..., RuntimeRequest]) -> None:
    request = nano("run", model={"source": str(folder)})
    assert error_of(bootstrap.examine_deeply(request, Settings.from_environment())) is None
    BROKEN["NaN weight"](folder)
    error = error_of(bootstrap.examine_deeply(request, Settings.from_environment()))
    assert isinstance(error, RequestError)
    assert "no finite number" in str(error)


def kill_yourself(connection: Any) -> None:
    """Stands in for a trial that the kernel kills."""
    os.kill(os.getpid(), signal.SIGKILL)


class Elsewhere:
    """Helpers that fork another entry."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server

    def fork(self, entry: str, log_name: str) -> Any:
        return self.server.fork("test_models_trial:kill_yourself", log_name)


def test_a_trial_that_is_killed_says_so(folder: Path, fork_server: ForkServer, nano: Callable[..., RuntimeRequest]) -> None:
    with pytest.raises(EnvironmentUnfit, match="its process died") as caught:
        try_in_child(nano(model={"source": str(folder)}), Settings.from_environment(), "float32", Elsewhere(fork_server))
    assert isinstance(caught.value, MemError)


def test_weights_that_are_whole_numbers_pass(folder: Path) -> None:
    """Formats that hold no fractions pass: only numbers that can be not finite are judged."""
    tensors = {**load_file(folder / "model.safetensors"), "extra.steps": torch.arange(3)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert passes(folder)
