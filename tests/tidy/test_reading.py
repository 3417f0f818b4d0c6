"""Files are opened for reading in one module, which refuses pipes, devices and what is too large; the exceptions say why they are safe."""

import ast
from collections.abc import Iterator

from source_tree import dotted_name, python_files, tree_of

OPENER = "mem_core/infrastructure/storage/reading.py"
KERNEL = "the kernel's own files under /proc and /sys"
PROVEN = "a file that its checkpoint's manifest has just proven to be plain"
# File or folder -> why what it opens can be nothing else than a plain file, or why it may be.
MAY_READ = {
    "mem_core/testing/": "for tests",
    "mem_core/runtime/chaos/": "drills look at a run that they started themselves, and at /proc",
    "mem_core/infrastructure/machine/cgroups.py": KERNEL,
    "mem_core/infrastructure/machine/memory_probe.py": KERNEL,
    "mem_core/infrastructure/machine/process_facts.py": KERNEL,
    "mem_core/infrastructure/settings.py": KERNEL,
    "mem_core/runtime/data/encoding/cache.py": "a folder, to make its names durable",
    "mem_core/infrastructure/telemetry/metrics.py": "numpy reads what was opened as a plain file",
    "mem_core/runtime/ranks/local/silence.py": KERNEL,
    "mem_core/runtime/checkpoint_manager/inspection/tensor_checks.py": PROVEN,
    "mem_core/runtime/deepspeed/programs/export.py": PROVEN,
    "mem_core/runtime/deepspeed/programs/reshard.py": PROVEN,
    "mem_core/runtime/deepspeed/snapshot.py": PROVEN,
}
READERS = {"np.load", "np.fromfile", "np.loadtxt", "torch.load", "shutil.copyfile", "shutil.copy", "io.open"}


def reading_calls(name: str) -> Iterator[int]:
    """Lines that open a file by its path to read it."""
    for node in ast.walk(tree_of(name)):
        if not isinstance(node, ast.Call):
            continue
        called = dotted_name(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        is_path_open = method == "open" and called != "os.open" and not called[:1].isupper()
        opens = called == "open" or is_path_open
        descriptor = called == "os.open" and any(isinstance(part, ast.Attribute) and part.attr == "O_RDONLY" for part in ast.walk(node))
        if called in READERS or method in ("read_text", "read_bytes") or descriptor or (opens and not _writes(node, is_path_open)):
            yield node.lineno


def _writes(call: ast.Call, is_method: bool) -> bool:
    position = 0 if is_method else 1
    modes = [*call.args[position : position + 1], *(word.value for word in call.keywords if word.arg == "mode")]
    return any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in modes)


def may_read(name: str) -> bool:
    return name == OPENER or any(name == known or (known.endswith("/") and name.startswith(known)) for known in MAY_READ)


def test_files_are_opened_for_reading_in_one_place() -> None:
    found = [f"{name}:{line}" for name in python_files("mem_core", "flows", "tasks") if not may_read(name) for line in reading_calls(name)]
    assert found == []


def test_every_exception_is_one() -> None:
    reading = [name for name in python_files("mem_core", "flows", "tasks") if any(reading_calls(name))]
    assert [known for known in MAY_READ if not any(name.startswith(known) for name in reading)] == []


def test_the_rule_sees_what_it_looks_for() -> None:
    assert any(reading_calls(OPENER))
