"""The repository's own source, parsed once for the tidy tests."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("mem_core", "flows", "tasks", "deployments")
INSTALLED = ("mem_core", "flows", "tasks")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=1)
def tracked_files() -> tuple[str, ...]:
    """Files that git knows, relative to the root."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in done.stdout.splitlines() if (ROOT / name).is_file())


def python_files(*folders: str) -> list[str]:
    """Tracked Python files under the folders."""
    return [name for name in tracked_files() if name.endswith(".py") and name.split("/", 1)[0] in folders]


@cache
def tree_of(name: str) -> ast.Module:
    """The parsed file."""
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), filename=name)


def imports_of(name: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a file, those inside functions too. `from a.b import c` counts as a.b and a.b.c."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@lru_cache(maxsize=1)
def modules() -> dict[str, str]:
    """Dotted name -> file of everything that is installed; a package's `__init__.py` is the package."""
    return {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in python_files(*INSTALLED)}


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports anywhere, inside functions too. `from package import module` means the module."""
    return {module: set(_imported_modules(name)) & modules().keys() - {module} for module, name in modules().items()}


def _imported_modules(name: str) -> Iterator[str]:
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (full if full in modules() else str(node.module) for full in whole)


def functions_of(name: str) -> Iterator[tuple[str, Function]]:
    """(qualified name, node) of every function and method of a file."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, Function):
                yield prefix + node.name, node
            if isinstance(node, Function | ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    yield from walk(tree_of(name).body, "")


def calls_of(name: str) -> Iterator[tuple[ast.Call, str]]:
    """(call, dotted name of what is called) of a file; calls of other expressions have no name and are left out."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Call):
            dotted = dotted_name(node.func)
            if dotted:
                yield node, dotted


def dotted_name(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain on a name, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted_name(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""
