"""The doctor's word on model and configuration as the libraries themselves see them, and where compiled code can be loaded from."""

import os
from pathlib import Path

import pytest

from mem_core.core.doctor.software import engine_findings
from mem_core.domain.environment import EngineObservation, EngineProblem
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine.build import executable_problem
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.session.opening.engine_probe import probe_engine, read_answer
from mem_core.runtime.session.opening.prepare_service import refuse_unexecutable

REQUEST = RuntimeRequest.model_validate({"run_id": "a", "store": "/tmp/a", "device": "cpu"})


def settings_at(home: Path) -> Settings:
    return Settings.from_environment(dict(os.environ) | {"MEM_HOME": str(home)})


def noexec_folder() -> Path | None:
    """A writable folder whose mount takes no compiled code, where this machine has one."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "tmpfs" and "noexec" in options.split(",") and "rw" in options.split(",") and os.access(point, os.W_OK):
            return Path(point)
    return None


def test_what_the_child_says_becomes_findings_with_the_right_codes() -> None:
    """64 for what the request asks, 69 for libraries that do not even load, a notice where nothing is known."""
    out = 'noise\n{"problems": [["deepspeed", "tensorboard.enabled: not a boolean", "Mend it.", "", 64]], "attention": "sdpa"}\n'
    (finding,) = engine_findings(read_answer(0, out, ""))
    assert (finding.check, finding.severity, finding.exit_code) == ("deepspeed", "failure", 64)
    (finding,) = engine_findings(read_answer(1, "", "Traceback\n  File x\nValueError: docstring of x\n"))
    assert (finding.severity, finding.exit_code) == ("failure", 69)
    assert "ValueError: docstring of x" in finding.observed
    (finding,) = engine_findings(read_answer(-9, "", ""))
    assert (finding.severity, finding.exit_code) == ("notice", 0)


def test_attention_without_a_fused_kernel_is_said_once() -> None:
    """It trains, with more memory."""
    (finding,) = engine_findings(EngineObservation(architecture="Gemma2ForCausalLM", attention="eager"))
    assert finding.severity == "notice"
    assert "Gemma2ForCausalLM" in finding.observed
    assert engine_findings(EngineObservation(attention="sdpa")) == ()
    assert engine_findings(None) == ()
    problem = EngineProblem(field="model.source", problem="x", remedy="y")
    assert [finding.check for finding in engine_findings(EngineObservation(problems=(problem,)))] == ["model.source"]


def test_what_adapters_leave_out_is_named_and_what_trains_is_counted() -> None:
    """From the child's answer; a refusal keeps the names that there are."""
    out = '{"problems": [], "num_trainable_parameters": 512, "left_out": ["model.layers.*.mlp.experts.down_proj"]}\n'
    seen = read_answer(0, out, "")
    assert seen.num_trainable_parameters == 512
    (finding,) = engine_findings(seen)
    assert (finding.check, finding.severity) == ("model.lora", "notice")
    assert "model.layers.*.mlp.experts.down_proj" in finding.observed
    out = '{"problems": [["model.freeze", "no such parameter (got h.*)", "Mend it.", "model.norm.weight"]]}\n'
    (finding,) = engine_findings(read_answer(0, out, ""))
    assert (finding.severity, finding.exit_code, finding.needed) == ("failure", 64, "model.norm.weight")


def test_a_preset_without_raw_keys_costs_no_process(tmp_path: Path) -> None:
    """The common case stays quick."""
    assert probe_engine(REQUEST, settings_at(tmp_path), program="no_such_module") is None


def test_a_child_that_cannot_answer_is_told_from_one_that_has_no_time(tmp_path: Path) -> None:
    """And neither leaves its folder behind."""
    asked = REQUEST.model_copy(update={"deepspeed": {"tensorboard": {"enabled": False}}})
    died = probe_engine(asked, settings_at(tmp_path), program="no_such_module")
    assert died is not None
    assert "no_such_module" in died.died
    slow = probe_engine(asked, settings_at(tmp_path), limit_s=0.01)
    assert slow is not None
    assert "no answer within" in slow.unknown
    assert not (tmp_path / "logs").exists()


def test_compiled_code_can_be_loaded_from_an_ordinary_folder(tmp_path: Path) -> None:
    """Nothing is left behind by looking."""
    assert executable_problem(tmp_path / "new") == ""
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    """Before step 0 and with exit 69; only where something is compiled."""
    (tmp_path / "home").write_text("a file where the folder should be")
    refuse_unexecutable(REQUEST, settings_at(tmp_path / "home"))
    compiled = REQUEST.model_copy(update={"model": REQUEST.model.model_copy(update={"compile": "on"})})
    with pytest.raises(EnvironmentUnfit, match="MEM_HOME.*" + str(tmp_path)):
        refuse_unexecutable(compiled, settings_at(tmp_path / "home"))


def test_a_noexec_mount_is_named() -> None:
    """A real one."""
    folder = noexec_folder()
    if folder is None:
        pytest.skip("this machine has no writable tmpfs that is mounted noexec")
    assert "not permitted" in executable_problem(folder).lower()
