"""Calls that have no place here, and tests that could not fail."""

import ast

from source_tree import Function, calls_of, dotted_name, functions_of, imports_of, python_files

PRODUCT = ("mem_core", "flows", "tasks")
BANNED = {
    "pickle.load": "runs code from a file",
    "pickle.loads": "runs code from bytes",
    "eval": "runs text as code",
    "exec": "runs text as code",
    "os.system": "a shell without quoting",
    "yaml.load": "builds any object; use safe_load or a loader made from SafeLoader, named below",
    "yaml.unsafe_load": "builds any object; use safe_load",
    "tempfile.mktemp": "a name that somebody else can take",
    "time.clock_settime": "the clock belongs to the machine",
}
MAY_PRINT = {
    "mem_core/runtime/deepspeed/programs/probe_engine.py": "a program: its one line is read by the doctor",
    "mem_core/runtime/deepspeed/programs/build_ops.py": "a program: its lines are read by the prepare step",
    "mem_core/runtime/memory/adaptive_memory.py": "runs in a rank process, whose standard output is its log",
    "mem_core/testing/driver.py": "a program: its line is read by the test that started it",
}
SAFE_LOADERS = {
    "mem_core/infrastructure/request/file.py": "a SafeLoader that refuses keys given twice",
    "mem_core/infrastructure/request/policy_file.py": "the same loader",
}


def test_no_banned_call() -> None:
    found = [f"{name}:{call.lineno} {called}" for name in python_files(*PRODUCT) for call, called in calls_of(name) if called in BANNED]
    assert [item for item in found if not (item.endswith(" yaml.load") and item.split(":")[0] in SAFE_LOADERS)] == []


def test_torch_load_always_says_weights_only() -> None:
    found = []
    for name in python_files(*PRODUCT):
        for call, called in calls_of(name):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            safe = isinstance(given.get("weights_only"), ast.Constant) and given["weights_only"].value is True  # type: ignore[union-attr]
            if called == "torch.load" and not safe:
                found.append(f"{name}:{call.lineno}")
    assert found == []


def test_the_library_never_prints_on_standard_output() -> None:
    """That is the command's: `--json` puts one object there. A print into a stream that was handed in is fine."""
    found = [
        f"{name}:{call.lineno}"
        for name in python_files("mem_core")
        for call, called in calls_of(name)
        if called == "print" and "file" not in {keyword.arg for keyword in call.keywords}
    ]
    assert [place for place in found if place.split(":")[0] not in MAY_PRINT] == []


def test_no_module_of_pickle_is_imported_by_name() -> None:
    """`from pickle import loads` would slip past the call rule."""
    found = [f"{name}:{line}" for name in python_files(*PRODUCT) for line, module in imports_of(name) if module.startswith("pickle.load")]
    assert found == []


def _checks_something(node: Function, checkers: set[str]) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert):
            return True
        if isinstance(inner, ast.Call):
            called = dotted_name(inner.func)
            if called in ("pytest.raises", "pytest.warns", "pytest.fail") or called.rsplit(".", 1)[-1] in checkers:
                return True
    return False


def test_every_test_asserts_something() -> None:
    """Directly, or through a helper that does (two steps deep)."""
    functions = [(name, function, node) for name in python_files("tests", "mem_core") for function, node in functions_of(name)]
    helpers = [item for item in functions if item[0].startswith(("tests/", "mem_core/testing/"))]
    checkers: set[str] = set()
    for _ in range(2):
        checkers |= {function.rsplit(".", 1)[-1] for _, function, node in helpers if _checks_something(node, checkers)}
    tests = [item for item in helpers if item[1].rsplit(".", 1)[-1].startswith("test_")]
    idle = [f"{name}::{function}" for name, function, node in tests if not _checks_something(node, checkers - {function.rsplit(".")[-1]})]
    assert idle == []
    assert len(tests) > 100


def test_patches_are_rare() -> None:
    """At most two monkeypatched attributes per hundred tests: a test that needs one usually asks for an argument."""
    tests = patches = 0
    for name in python_files("tests"):
        tests += sum(function.rsplit(".", 1)[-1].startswith("test_") for function, _ in functions_of(name))
        patches += sum(called in ("monkeypatch.setattr", "mock.patch", "patch", "patch.object") for _, called in calls_of(name))
    assert patches <= 0.02 * tests
