"""Imports point one way: deployments → flows → tasks → mem_core.{core, runtime, infrastructure} → mem_core.domain."""

import ast
import subprocess
import sys

import pytest
from source_tree import PRODUCT, ROOT, dotted_name, imports_of, python_files, tree_of

STANDARD = sys.stdlib_module_names
# Where a file under the key's folder may import none of these.
NEVER = {
    "mem_core": ("prefect", "flows", "tasks"),
    "tasks": ("flows", "deployments"),
    "flows": ("deployments",),
}
# The environment is read in one module. These write it, for a library that reads it at import and takes no argument.
ENVIRONMENT_USERS = {
    "mem_core/infrastructure/settings.py": "reads it, for everyone",
    "mem_core/runtime/ranks/worker/main.py": "writes DeepSpeed's five rendezvous variables into its own rank process",
    "flows/commands/train.py": "points Prefect's client at the embedded server before Prefect is imported",
    "flows/server/serve.py": "the same for the server of mem serve",
}
# Programs that the fork server or an interpreter starts: importing them is running them.
MAY_ACT = {
    "mem_core/runtime/ranks/worker/preload.py": "its import is the fork server's preparation",
    "mem_core/infrastructure/request/file.py": "fills the tables of its own YAML loader class",
}
HEAVY = ("torch", "deepspeed", "transformers", "matplotlib", "tensorboard", "s3fs", "prefect")
LIGHT_MODULES = ("flows", "flows.cli", "flows.commands.train", "flows.commands.doctor", "flows.commands.report", "mem_core.bootstrap")


def offences(folder: str, banned: tuple[str, ...], but: str = "-") -> list[str]:
    found = []
    for name in python_files(folder.split("/", 1)[0]):
        if name.startswith(folder + "/") and not name.startswith(but):
            found += [f"{name}:{line} imports {module}" for line, module in imports_of(name) if module.split(".")[0] in banned]
    return found


@pytest.mark.parametrize("folder", NEVER)
def test_a_lower_layer_never_imports_a_higher_one(folder: str) -> None:
    assert offences(folder, NEVER[folder]) == []


def test_domain_imports_only_the_standard_library_pydantic_and_itself() -> None:
    found = [
        f"{name}:{line} imports {module}"
        for name in python_files("mem_core")
        if name.startswith("mem_core/domain/")
        for line, module in imports_of(name)
        if module.split(".")[0] not in STANDARD | {"pydantic"} and not module.startswith("mem_core.domain")
    ]
    assert found == []


def test_only_one_package_imports_deepspeed() -> None:
    found = [offence for folder in PRODUCT for offence in offences(folder, ("deepspeed",), but="mem_core/runtime/deepspeed/")]
    assert found == []


def test_production_code_never_imports_what_is_for_tests() -> None:
    found = [
        f"{name}:{line}"
        for name in python_files(*PRODUCT)
        if not name.startswith("mem_core/testing/")
        for line, module in imports_of(name)
        if module.startswith(("mem_core.testing", "tests"))
    ]
    assert found == []


def test_the_environment_is_read_in_one_module() -> None:
    found = []
    for name in python_files(*PRODUCT):
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.expr) and dotted_name(node) in ("os.environ", "os.getenv", "os.putenv"):
                found.append((name, node.lineno))
    assert {name for name, _ in found} == set(ENVIRONMENT_USERS), found


def test_importing_a_module_acts_on_nothing() -> None:
    """At the top of a module stand definitions, imports and values; no statement that does something."""
    found = [
        f"{name}:{node.lineno}"
        for name in python_files(*PRODUCT)
        if name not in MAY_ACT
        for node in tree_of(name).body
        if isinstance(node, ast.For | ast.While | ast.With) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    ]
    assert found == []


def test_the_command_starts_without_any_heavy_import() -> None:
    """`mem --help` answers in a fraction of a second because nothing heavy is imported before it is needed."""
    program = f"import sys\nfor name in {LIGHT_MODULES}: __import__(name)\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_rules_are_able_to_fail() -> None:
    """The parser sees what it looks for: this file imports pytest, and settings.py reads the environment."""
    assert "pytest" in {module for _, module in imports_of("tests/tidy/test_layers.py")}
    settings = ast.walk(tree_of("mem_core/infrastructure/settings.py"))
    assert any(dotted_name(node) == "os.environ" for node in settings if isinstance(node, ast.expr))
