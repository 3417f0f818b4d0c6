"""Addresses that others hold on to, or that are written as text: flows, the console script, programs started by name. A module that
moves takes them along."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
import yaml
from source_tree import INSTALLED, ROOT, modules, python_files, tracked_files, tree_of

import mem_core.domain.errors as errors
import mem_core.domain.request as request

FLOWS = ("endurance", "finetune", "restart", "restore_drill", "doctor", "chaos_drill", "generate")
ERRORS = {
    "MemError": None, "RequestError": 64, "DataError": 66, "EnvironmentUnfit": 69, "InternalError": 70, "StoreUnavailable": 73,
    "NoValidCheckpoint": 74, "Interrupted": 75, "RunHeld": 76, "MemoryExhausted": 78, "NoProgress": 79, "PolicyRefused": 80,
}  # fmt: skip
REQUEST_NAMES = {
    "RuntimeRequest", "ModelSection", "LoraSection", "DataSection", "TrainingSection", "ParallelSection", "MemorySection",
    "CheckpointSection", "PolicySection", "PlannerSection", "ApprovalSection", "ResilienceSection", "ChaosSection", "Section",
    "PositiveInt", "MAX_SEGMENTS", "STEPS_LIMIT", "OWNED_DEEPSPEED_KEYS",
}  # fmt: skip
# What is started by an address today. One that is renamed is renamed here too, so that the search below is known to find it.
STARTED = {
    "mem_core.runtime.ranks.local.fork_server", "mem_core.runtime.ranks.worker.preload", "mem_core.runtime.ranks.worker.main:rank_main",
    "mem_core.runtime.proof.validator_process:validator_main", "mem_core.runtime.chaos.faults.faulty_runner:make_faulty",
    "mem_core.runtime.data.encoding.tokenize_process", "mem_core.runtime.deepspeed.programs.build_ops", "flows.commands.owned",
    "mem_core.runtime.deepspeed.programs.export", "mem_core.runtime.deepspeed.programs.reshard", "flows.commands.restore_probe",
    "flows.commands.drill_child", "flows.server.embedded", "flows.automations", "flows.endurance_flow",
}  # fmt: skip
ADDRESS = re.compile(rf"^(?:{'|'.join(INSTALLED)})(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?$")
STARTED_IN_WORDS = re.compile(rf"-m ((?:{'|'.join(INSTALLED)})(?:\.[A-Za-z_]\w*)+)")
WORDS = (".md", ".yaml", ".yml", ".json", ".ipynb", ".sh", ".toml", "Makefile", ".ci/run")


def top_names(module: str) -> set[str]:
    """What a module defines, assigns or imports at its top."""
    found: set[str] = set()
    for node in tree_of(modules()[module]).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            case ast.Assign():
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign():
                found |= {node.target.id} if isinstance(node.target, ast.Name) else set()
            case _:
                pass
    return found


def exists(address: str) -> bool:
    """Whether `package.module`, `package.module:name` or `package.module.name` is there, told without importing it."""
    module, _, name = address.partition(":")
    if not name and module not in modules():
        module, _, name = module.rpartition(".")
    return module in modules() and (not name or name in top_names(module))


def addresses_in(name: str) -> Iterator[tuple[int, str]]:
    """(line, address) of every text of a file that is an address of ours; texts with NUL between words are taken apart."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            yield from ((node.lineno, word) for word in text.split("\0") if ADDRESS.match(word))


def written_addresses() -> list[tuple[str, str]]:
    """(where, address) in code, and after `-m` in what people read and run."""
    found = [(f"{name}:{line}", address) for name in python_files(*INSTALLED, "tests") for line, address in addresses_in(name)]
    for name in tracked_files():
        if name.endswith(WORDS):
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            found += [(name, match.group(1)) for match in STARTED_IN_WORDS.finditer(text)]
    return [(where, address) for where, address in found if not where.startswith("tests/tidy/")]  # examples that are wrong


def entrypoints() -> list[str]:
    deployments = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
    return [deployment["entrypoint"] for deployment in deployments]


def test_every_address_that_is_written_as_text_exists() -> None:
    """A test that needs an address which does not exist says `nothing` in it."""
    missing = [f"{where} {address}" for where, address in written_addresses() if not exists(address)]
    assert [line for line in missing if "nothing" not in line.split(".")] == []


def test_the_search_finds_what_is_started() -> None:
    assert STARTED - {address for _, address in written_addresses()} == set()


@pytest.mark.parametrize(
    ("address", "there"),
    [
        ("mem_core.runtime.ranks.worker.main:rank_main", True),
        ("flows.endurance_flow.endurance", True),
        ("flows.commands", True),
        ("mem_core.runtime.ranks.worker.main:no_such", False),
        ("mem_core.runtime.worker.main:rank_main", False),
        ("flows.train_command", False),
    ],
)
def test_an_address_of_another_time_is_told_from_one_that_exists(address: str, there: bool) -> None:
    assert ADDRESS.match(address)
    assert exists(address) == there


def test_every_program_has_a_main_guard() -> None:
    """`python -m package.module` on a module without one does nothing and says nothing."""
    started = {address for _, address in written_addresses() if address in STARTED and ":" not in address and not address.endswith("_flow")}
    silent = [address for address in started if "__name__" not in ast.unparse(tree_of(modules()[address]).body[-1])]
    assert silent == ["mem_core.runtime.ranks.worker.preload"], "its import is what is asked for"


def test_the_flows_and_the_deployments_import() -> None:
    """As Prefect and notebooks do it: in a fresh process, by name."""
    program = f"""
import importlib
from flows import {", ".join(FLOWS)}
from flows.submit import submit
from flows.automations import apply_automations
named = [{", ".join(FLOWS)}]
for entrypoint in {entrypoints()!r}:
    module, _, name = entrypoint.rpartition(".")
    assert getattr(importlib.import_module(module), name) in named, entrypoint
assert callable(submit) and callable(apply_automations)
print(*[flow.name for flow in named])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(flow.replace("_", "-") for flow in FLOWS)


def test_every_flow_has_a_deployment() -> None:
    assert sorted(address.rpartition(".")[2] for address in entrypoints()) == sorted(FLOWS)
    assert all(exists(address) for address in entrypoints())


def test_the_console_script_is_the_one_that_is_installed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"mem": "flows.cli:main"}
    assert exists(scripts["mem"])


def test_the_error_tree_keeps_its_names_and_exit_codes() -> None:
    """More may be added; what a caller catches today stays."""
    assert {name: getattr(getattr(errors, name, None), "exit_code", None) for name in ERRORS if ERRORS[name]} == {
        name: code for name, code in ERRORS.items() if code
    }
    assert all(issubclass(getattr(errors, name), errors.MemError) for name in ERRORS)


def test_the_request_keeps_its_names() -> None:
    assert REQUEST_NAMES - set(request.__all__) == set()
    assert all(hasattr(request, name) for name in request.__all__)
