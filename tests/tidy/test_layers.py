"""Imports point one way: deployments → flows → tasks → bootstrap → runtime → core → infrastructure → domain; never in a circle."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from source_tree import INSTALLED, PRODUCT, ROOT, dotted_name, import_graph, imports_of, modules, python_files, tree_of

STANDARD = sys.stdlib_module_names
# Where a file under the key's folder may import none of these.
NEVER = {
    "mem_core": ("prefect", "flows", "tasks"),
    "tasks": ("flows", "deployments"),
    "flows": ("deployments",),
}
# From the ground up: a module imports from its own layer and from those below it. What is for tests stands beside the bootstrap.
LAYERS = (
    ("mem_core.domain",),
    ("mem_core.infrastructure",),
    ("mem_core.core",),
    ("mem_core.runtime",),
    ("mem_core.bootstrap", "mem_core.testing"),
    ("tasks",),
    ("flows",),
)
MOST_FILES_IN_A_FOLDER = 16
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


def layer_of(module: str) -> int | None:
    """Height of a module's layer; None for the bare package `mem_core`, which holds nothing."""
    heights = (height for height, layer in enumerate(LAYERS) for root in layer if module == root or module.startswith(f"{root}."))
    return next(heights, None)


def arrows_up(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Imports that run from a layer to a higher one."""
    found: list[str] = []
    for module, imported in ((module, imported) for module, names in graph.items() for imported in names):
        here, there = layer_of(module), layer_of(imported)
        if here is not None and there is not None and here < there:
            found.append(f"{module} imports {imported}")
    return sorted(found)


def circles(graph: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Groups of modules that reach each other and themselves by imports."""
    reached = {module: _reached(graph, module) for module in graph}
    return sorted({tuple(sorted(other for other in reached[module] if module in reached[other])) for module in graph} - {()})


def _reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(graph[waiting.pop()]) - reached
        reached |= new
        waiting += new
    return reached


def test_no_import_runs_up() -> None:
    assert arrows_up(import_graph()) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(import_graph()) == []


def test_every_module_stands_in_a_layer() -> None:
    assert [module for module in modules() if layer_of(module) is None] == ["mem_core"]


def test_no_folder_is_too_full_to_be_looked_through() -> None:
    counted = Counter(name.rpartition("/")[0] for name in python_files(*INSTALLED))
    assert {folder: number for folder, number in counted.items() if number > MOST_FILES_IN_A_FOLDER} == {}


def test_circles_and_arrows_up_are_found() -> None:
    """Imports that are wrong, among some that are right."""
    graph = {
        "flows.cli": ["tasks.doctor", "mem_core.domain.run"],
        "tasks.doctor": ["mem_core.bootstrap"],
        "mem_core.bootstrap": ["mem_core.core.a"],
        "mem_core.core.a": ["mem_core.core.b"],
        "mem_core.core.b": ["mem_core.core.c"],
        "mem_core.core.c": ["mem_core.core.a", "mem_core.domain.run"],
        "mem_core.domain.run": ["mem_core.infrastructure.settings"],
        "mem_core.infrastructure.settings": ["mem_core.bootstrap"],
    }
    assert arrows_up(graph) == [
        "mem_core.domain.run imports mem_core.infrastructure.settings",
        "mem_core.infrastructure.settings imports mem_core.bootstrap",
    ]
    assert circles({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []}) == [("a", "b", "c")]
    assert circles({"a": ["b"], "b": ["c"], "c": []}) == []
    assert "flows.commands.train" in import_graph()["flows.cli"], "an import inside a function counts"


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
