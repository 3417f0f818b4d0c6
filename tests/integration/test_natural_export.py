"""A run on a model folder ends with a model folder: whole or not at all, the same weights, made again where it is missing."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.commands.export import Wanted, export_run
from flows.commands.inspection.finished import result_if_finished
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.events import Evaluated
from mem_core.domain.request import ModelSection, RuntimeRequest
from mem_core.domain.results.exports import MARK_NAME, ExportMark, ExportOrder
from mem_core.domain.run import RunResult
from mem_core.runtime.models.build import build_model, save_pretrained_folder
from mem_core.testing.ports import Console

Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]
DIES_BEFORE_THE_SWAP = """
import os, signal, sys
from mem_core.runtime.deepspeed.programs import export as program
program._describe = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
program.export(program.ExportOrder.model_validate_json(sys.stdin.read()))
"""
TRAINING = {"max_steps": 6, "segment_steps": 3, "global_batch_size": 4, "warmup_steps": 1}
NANO = ModelSection(source="preset:llama-nano")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder in bfloat16 with everything that people put into one."""
    folder = tmp_path / "model"
    named = build_model(NANO, 128, 0, "float32", False).named_parameters()
    save_pretrained_folder(NANO, {name: tensor.detach().to(torch.bfloat16) for name, tensor in named}, folder)
    (folder / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 5}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def asked(nano: Nano, model: Path) -> Callable[..., RuntimeRequest]:
    def make(run_id: str = "run", **sections: Any) -> RuntimeRequest:
        section = {"source": str(model), "dtype": "float32"}
        return nano(run_id, **{"model": section, "training": TRAINING, "data": {"sequence_length": 32}, **sections})

    return make


def loaded(folder: Path) -> Any:
    """What plain transformers makes of it; nothing may be missing or left over."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network, info = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoTokenizer.from_pretrained(str(folder), local_files_only=True)("words").input_ids
    return network


def test_a_run_ends_with_a_model_folder(
    drive: Drive, asked: Callable[..., RuntimeRequest], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console()
    result = drive(asked(), progress=console)
    folder = tmp_path / "run" / "export"
    assert result.export is not None
    assert (result.export.folder, result.export.dtype, result.export.step) == (str(folder), "bfloat16", 6)
    assert result.export.weights_digest == result.weights_digest
    assert f"the model of step 6 is in {folder} (bfloat16)" in console.text
    assert str(folder) in (tmp_path / "run" / "report.html").read_text()

    mark = ExportMark.model_validate_json((folder / MARK_NAME).read_text())
    needed = {"config.json", "model.safetensors", "generation_config.json", "chat_template.jinja", "README.md", "tokenizer_config.json"}
    assert needed <= mark.files.keys(), "what transformers, vLLM and llama.cpp's converter look for"
    sources = [path for path in model.iterdir() if "token" in path.name or path.name in ("generation_config.json", "chat_template.jinja")]
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in sources)
    assert sources

    card = (folder / "README.md").read_text()
    for fact in (str(model), result.weights_digest, result.trajectory_digest, "faults survived", "loss"):
        assert fact in card

    network = loaded(folder)
    assert export_run(tmp_path / "run", Wanted(), "float32", tmp_path / "whole", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["weights_digest"] == result.weights_digest
    whole = dict(loaded(tmp_path / "whole").named_parameters())
    for name, tensor in network.named_parameters():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.float(), whole[name].to(torch.bfloat16).float()), name


def test_an_export_that_is_missing_or_broken_is_made_again(drive: Drive, asked: Callable[..., RuntimeRequest], tmp_path: Path) -> None:
    """By the same command, without a step; and one that is whole is left alone, with what lies in it."""
    request = asked()
    first, folder = drive(request), tmp_path / "run" / "export"
    assert export_run(tmp_path / "run", Wanted(step=3), "auto", None, as_json=False) == 0
    stamp = (folder / MARK_NAME).stat().st_mtime_ns
    assert result_if_finished(tmp_path / "run", request) is not None
    again = drive(request)
    assert (folder / MARK_NAME).stat().st_mtime_ns == stamp
    assert again.export == first.export

    (folder / "model.safetensors").write_bytes(b"cut")
    assert result_if_finished(tmp_path / "run", request) is None
    third = drive(request)
    assert (third.applied_steps, third.weights_digest) == (6, first.weights_digest)
    loaded(folder)
    loaded(folder / "step-000000003")

    shutil.rmtree(folder)
    (tmp_path / "run" / ".export.partial").mkdir()
    drive(request)
    loaded(folder)
    assert not (tmp_path / "run" / ".export.partial").exists()


def test_an_export_that_cannot_be_made_is_said_and_ends_no_run(drive: Drive, asked: Callable[..., RuntimeRequest], tmp_path: Path) -> None:
    console, request = Console(), asked()

    def in_the_way(stage: Any) -> None:
        (tmp_path / "run" / ".export.partial").write_text("a file where a folder is to be")

    result = drive(request, progress=console, prepared=in_the_way)
    assert (result.status, result.exit_code, result.applied_steps) == ("completed", 0, 6)
    assert result.export is not None
    assert result.export.folder == ""
    assert "no export: " in console.text
    (tmp_path / "run" / ".export.partial").unlink()
    assert drive(request).export == result.export.model_copy(
        update={"folder": str(tmp_path / "run" / "export"), "dtype": "bfloat16", "weights_digest": result.weights_digest, "problem": ""}
    )


@pytest.mark.parametrize("sections", [{"checkpoint": {"export": "off"}}, {"model": {"source": "preset:llama-nano"}}], ids=["off", "preset"])
def test_nothing_is_made_that_nobody_wants(
    sections: dict[str, Any], drive: Drive, asked: Callable[..., RuntimeRequest], tmp_path: Path
) -> None:
    result = drive(asked(**sections))
    assert result.export is None
    assert not (tmp_path / "run" / "export").exists()


@pytest.mark.slow
def test_the_best_step_is_exported_by_name(
    drive: Drive, asked: Callable[..., RuntimeRequest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = asked("picked", evaluation={"every_steps": 2, "keep_best": True, "max_rows": 4}, checkpoint={"export": "off"})
    result = drive(request)
    assert result.best is not None
    assert export_run(tmp_path / "picked", Wanted(best=True), "auto", None, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step"], Path(answer["folder"]).name) == (result.best.step, f"step-{result.best.step:09d}")
    events = [line.event for line in read_journal(tmp_path / "picked" / "journal")]
    losses = {event.step: event.validation_loss for event in events if isinstance(event, Evaluated)}
    assert result.best.value == min(losses.values())
    with pytest.raises(NoValidCheckpoint):
        export_run(tmp_path / "picked", Wanted(step=5), "auto", None, as_json=False)
    blind = drive(asked("blind", data={"sequence_length": 32, "validation": None}, checkpoint={"export": "off"}))
    assert blind.best is None
    with pytest.raises(RequestError, match="--best"):
        export_run(tmp_path / "blind", Wanted(best=True), "auto", None, as_json=False)


def test_a_kill_in_the_middle_leaves_no_half_folder(drive: Drive, asked: Callable[..., RuntimeRequest], tmp_path: Path) -> None:
    """Everything is written beside the final place; what a killed process left there is not what anybody loads."""
    request = asked()
    drive(asked(checkpoint={"export": "off"}))
    run = tmp_path / "run"
    order = ExportOrder(checkpoint=str(run / "checkpoints" / "step-000000006"), run_folder=str(run), output=str(run / "export"))
    child = subprocess.run([sys.executable, "-c", DIES_BEFORE_THE_SWAP], input=order.model_dump_json(), text=True, check=False)
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "export").exists()
    assert (tmp_path / "run" / ".export.partial").exists()
    drive(request)
    loaded(tmp_path / "run" / "export")
