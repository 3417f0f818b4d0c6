"""The doctor on the machine that runs the tests: observations are real, and agree with other ways of asking."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mem_core.core.doctor.environment_doctor import EnvironmentDoctor
from mem_core.core.doctor.render import render_report
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine.build import observe_build
from mem_core.infrastructure.machine.observe import observe_accelerator, observe_machine, package_versions, usable_cores
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.runtime.data.look.first_look import look_at_data
from mem_core.runtime.models.numbers import read_model_numbers, tokenizer_size


def settings(home: Path) -> Settings:
    return Settings.from_environment({"PATH": os.environ["PATH"], "MEM_HOME": str(home)})


def test_a_default_request_is_examined_in_this_process_without_importing_torch(tmp_path: Path) -> None:
    """The flow process stays small and able to fork; the report is whole and leaves nothing behind."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mem_core.core.doctor.environment_doctor import EnvironmentDoctor\n"
        "from mem_core.domain.request import RuntimeRequest\n"
        "from mem_core.infrastructure.machine.observe import observe_machine\n"
        "from mem_core.runtime.data.look.first_look import look_at_data\n"
        "from mem_core.runtime.models.numbers import read_model_numbers\n"
        "from mem_core.infrastructure.settings import Settings\n"
        "request = RuntimeRequest(run_id='demo', store=sys.argv[1], device='cpu')\n"
        "seen = observe_machine(request, Settings.from_environment())\n"
        "data = look_at_data(request.data, request.model.source)\n"
        "report = EnvironmentDoctor().examine(request, seen, read_model_numbers(request.model.source), data)\n"
        "assert not {'torch', 'deepspeed', 'transformers', 's3fs'} & set(sys.modules), 'heavy import'\n"
        "print(report.model_dump_json())\n"
    )
    env = os.environ | {"MEM_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "runs")], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"device":"cpu"' in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_cores_and_memory_agree_with_psutil(tmp_path: Path) -> None:
    request = RuntimeRequest(run_id="demo", store=str(tmp_path), device="cpu")
    seen = observe_machine(request, settings(tmp_path))
    assert 1 <= seen.num_cores <= len(os.sched_getaffinity(0))
    assert seen.num_cores == usable_cores()
    assert abs(seen.host_limits["MemAvailable"] - psutil.virtual_memory().available) < 2 * 2**30
    assert seen.store.problem == ""


@pytest.mark.parametrize("home", ["/proc/none/mem", "file/mem"])
def test_a_home_that_cannot_be_written_is_seen_and_nothing_is_left(tmp_path: Path, home: str) -> None:
    """As root too, where permissions say nothing: a filesystem without files, and a file where a folder should be."""
    (tmp_path / "file").touch()
    seen = observe_machine(RuntimeRequest(run_id="demo", store=str(tmp_path), device="cpu"), settings(tmp_path / home))
    assert seen.home_problem
    assert seen.home.endswith(home)
    assert observe_machine(RuntimeRequest(run_id="demo", store=str(tmp_path), device="cpu"), settings(tmp_path)).home_problem == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_cuda_asked_for_gets_torchs_own_answer(tmp_path: Path) -> None:
    """Whatever torch says in a process of its own is what the doctor says."""
    program = "import torch\ntry:\n    torch.cuda.init(); print('yes')\nexcept Exception as error:\n    print(error)\n"
    env = child_environment(settings(tmp_path), device="cuda")
    torch_says = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env, check=True).stdout
    seen = observe_accelerator("cuda", env)
    if torch_says.strip() == "yes":
        assert seen.available
        assert seen.devices[0].total_bytes >= seen.devices[0].free_bytes > 0
    else:
        assert not seen.available
        assert seen.reason in torch_says or torch_says.strip().splitlines()[-1] in seen.reason


def test_the_table_of_ops_agrees_with_really_loading_them(tmp_path: Path) -> None:
    """A library that only looks whole is found out by opening it in a process of its own."""
    import _ctypes

    whole = Path(_ctypes.__file__).read_bytes()
    broken = whole.replace(b"libffi", b"libxxx")
    if broken == whole:
        pytest.skip("this Python links libffi statically")
    for op, content in (("good", whole), ("dangling", broken)):
        (tmp_path / op).mkdir()
        (tmp_path / op / f"{op}.so").write_bytes(content)
    env = child_environment(settings(tmp_path), device="cpu")
    seen = observe_build(tmp_path, env, load=True)
    assert seen.built_ops == ("good",)
    assert seen.broken_ops[0].startswith("dangling (")


def test_versions_are_those_of_the_installed_packages() -> None:
    from importlib.metadata import version

    found = package_versions()
    assert found["torch"] == version("torch")
    assert found["python"] == sys.version.split()[0]


def test_every_preset_has_numbers_and_a_report(tmp_path: Path) -> None:
    from mem_core.runtime.models.presets import PRESETS

    for name in PRESETS:
        request = RuntimeRequest(run_id="demo", store=str(tmp_path), device="cpu", model={"source": f"preset:{name}"})
        report = EnvironmentDoctor().examine(
            request,
            observe_machine(request, settings(tmp_path)),
            read_model_numbers(request.model.source),
            look_at_data(request.data, request.model.source),
        )
        assert report.estimates_bytes["checkpoint"] > 0
        assert render_report(report)


def test_a_tokenizers_largest_id_counts_and_not_the_number_of_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 12, "content": "<x>"}]}')
    assert tokenizer_size(tmp_path) == 13
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [["a", 0.1], ["b", 0.2]]}}')
    assert tokenizer_size(tmp_path) == 2
    (tmp_path / "tokenizer.json").write_text("{")
    assert tokenizer_size(tmp_path) is None
