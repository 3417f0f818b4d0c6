"""Who may know how ranks stand, meet and agree: training loop and supervisor see ports, so that many machines are one more adapter."""

import ast
import re

from source_tree import ROOT, dotted_name, imports_of, python_files, tree_of

FOLDERS = ("session", "proof", "checkpoint_manager", "deepspeed", "memory")
HOW_THIS_MACHINE_DOES_IT = {
    "loopback": re.compile(r"127\.0\.0\.1|\blocalhost\b|\bloopback\b|SOCKET_IFNAME"),
    "the file store": re.compile(r"FileStore|file://"),
    "a shared page": re.compile(r"\bmmap\.|\bimport mmap\b|\bMemoryBoard\b|\bBoard\b"),
    "/proc": re.compile(r"/proc\b"),
    "parent death": re.compile(r"prctl|PDEATHSIG"),
}
# Where parts are put together, somebody has to say which adapter it is.
MAY_NAME_THE_LOCAL_ADAPTER = {
    "mem_core/runtime/session/opening/stages.py": "holds the fork server of a run that is being opened",
    "mem_core/runtime/proof/deep_verify.py": "gives a resting run ranks for as long as it is verified",
}
LOCAL = "mem_core.runtime.ranks.local"
# torch means device 0 or the current device where none is named; these name it, or ask about no device.
MAY_NAME_TORCH_S_DEVICES = {
    "mem_core/runtime/ranks/worker/device.py": "the one local device of a rank",
    "mem_core/runtime/ranks/local/fork_server.py": "asks whether CUDA was touched before the fork",
}
OF_A_DEVICE = ("torch.cuda", "torch.default_generator", "torch.manual_seed", "torch.set_default_device")
SEEDED_APART = {
    "mem_core/runtime/models/build.py": "fresh weights, made on the host under a saved random state",
    "mem_core/runtime/models/adapters.py": "fresh adapters, in the same way",
}


def files_of(*folders: str) -> list[str]:
    return [name for name in python_files("mem_core") if name.startswith(tuple(f"mem_core/runtime/{folder}/" for folder in folders))]


def lines_that_name(files: list[str]) -> list[str]:
    return [
        f"{name}:{number} names {what}"
        for name in files
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1)
        for what, pattern in HOW_THIS_MACHINE_DOES_IT.items()
        if pattern.search(line)
    ]


def names_of_devices(files: list[str]) -> set[str]:
    return {
        name
        for name in files
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Attribute) and dotted_name(node).startswith(OF_A_DEVICE)
    }


def test_what_is_written_against_the_ports_does_not_name_how_one_machine_does_it() -> None:
    assert lines_that_name(files_of(*FOLDERS)) == []


def test_only_who_puts_parts_together_imports_the_local_adapter() -> None:
    importers = {name for name in files_of(*FOLDERS) for _, module in imports_of(name) if module.startswith(LOCAL)}
    assert importers == set(MAY_NAME_THE_LOCAL_ADAPTER)


def test_a_rank_s_device_is_named_in_one_place() -> None:
    runtime = [name for name in python_files("mem_core") if name.startswith("mem_core/runtime/")]
    assert names_of_devices(runtime) == set(MAY_NAME_TORCH_S_DEVICES) | set(SEEDED_APART)


def test_the_search_finds_what_it_looks_for() -> None:
    """In the adapter itself every one of these stands, but what it takes from infrastructure."""
    found = {line.partition(" names ")[2] for line in lines_that_name(files_of("ranks"))}
    assert found == set(HOW_THIS_MACHINE_DOES_IT) - {"parent death"}
    ties = lines_that_name(["mem_core/infrastructure/machine/process_ties.py"])
    assert any(line.endswith("parent death") for line in ties)
