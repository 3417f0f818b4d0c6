"""Real limits on a real process: the doctor must name the one that binds, and refuse what cannot fit under it."""

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

GIB = 2**30
EXAMINE = """
import json, os, pathlib, resource, sys
kind, argument, store = sys.argv[1:4]
if kind == "cgroup":
    (pathlib.Path(argument) / "cgroup.procs").write_text(str(os.getpid()))
else:
    resource.setrlimit(getattr(resource, kind), (int(argument), int(argument)))
from mem_core.core.doctor.environment_doctor import EnvironmentDoctor, error_of
from mem_core.domain.environment import ModelNumbers
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine.observe import observe_machine
from mem_core.infrastructure.settings import Settings
request = RuntimeRequest(run_id="demo", store=store, device="cpu")
seen = observe_machine(request, Settings.from_environment({"PATH": os.environ["PATH"], "MEM_HOME": store + "/home"}))
answer = {}
for name, parameters in (("small", 65_728), ("large", 1_000_000_000)):
    model = ModelNumbers(num_parameters=parameters, num_layers=1, hidden_size=64, vocab_size=384, num_heads=4)
    report = EnvironmentDoctor().examine(request, seen, model)
    # How full the disk of this machine is comes before memory in the order of the exit codes, and is not the subject here.
    of_memory = tuple(finding for finding in report.findings if finding.check not in ("disk", "inodes"))
    error = error_of(report.model_copy(update={"findings": of_memory}))
    budget = report.memory[0]
    answer[name] = [budget.budget_bytes, budget.binding_limit, error.exit_code if error else 0, str(error), report.max_build_jobs]
print(json.dumps(answer))
"""


def examine(kind: str, argument: str, store: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", EXAMINE, kind, argument, str(store)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def memory_controller() -> Path:
    """Own group of the version 1 memory controller, or the version 2 one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
        if number == "0" and (Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.current").exists():
            return Path("/sys/fs/cgroup") / path.lstrip("/")
    return Path("/nonexistent")


def test_a_real_cgroup_limit_of_2_gib_binds_and_refuses_a_model_that_cannot_fit(tmp_path: Path) -> None:
    group = memory_controller() / f"mem-doctor-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as exc:
        pytest.skip(f"no cgroup may be made here: {exc}")
    try:
        limit_file = next((file for name in ("memory.max", "memory.limit_in_bytes") if (file := group / name).exists()), None)
        if limit_file is None:
            pytest.skip("the memory controller is not given to new groups here")
        limit_file.write_text(str(2 * GIB))
        answer = examine("cgroup", str(group), tmp_path)
    finally:
        group.rmdir()
    size, binding, exit_code, _, jobs = answer["small"]
    assert 1.8 * GIB < size <= 2 * GIB
    assert group.name in binding
    assert exit_code == 0
    assert jobs == 1
    _, _, refused, message, _ = answer["large"]
    assert refused == 69
    assert group.name in message


def test_a_real_address_space_limit_binds_in_its_own_unit(tmp_path: Path) -> None:
    answer = examine("RLIMIT_AS", str(3 * GIB), tmp_path)
    size, binding, exit_code, _, _ = answer["small"]
    assert binding.startswith("RLIMIT_AS of 3.0 GiB")
    assert 2 * GIB < size < 3 * GIB
    assert exit_code == 0
    assert answer["large"][2] == 69
