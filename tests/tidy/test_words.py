"""Words that people rely on: README's commands work, no file names a machine, every requirement has a tested version."""

import ast
import re
import shlex
import tomllib

import pytest
import yaml
from source_tree import ROOT, python_files, tracked_files, tree_of

from flows.cli import build_parser
from mem_core.domain.errors import MemError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.request.errors import known_fields
from mem_core.infrastructure.request.file import build_request, load_request

MACHINE_PATHS = re.compile("/" + r"(work|root)/")
BINARY = (".png", ".npz", ".pt", ".bin", ".parquet", ".gz")
BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL_WORDS = {"git", "cd", "kill", "sleep", "export"}


def readme_commands() -> list[list[str]]:
    """Every command of README's shell blocks as words, comments left out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


COMING = (ROOT / "deployments" / "COMING_FROM_TRAINER.md").read_text(encoding="utf-8")


def test_the_page_for_people_from_other_trainers_names_fields_that_there_are() -> None:
    """Its request is one that may be run, and each name in a first column is a field, or a value of one."""
    build_request(yaml.safe_load(COMING.split("```yaml\n")[1].split("```")[0]))
    rows = [line.split("|")[1] for line in COMING.splitlines() if line.startswith("| `")]
    named = {name.split(":")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)} - {"run_id", "deepspeed"}
    assert len(named) > 25
    assert named <= {path for path, _ in known_fields(RuntimeRequest)}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("words", readme_commands(), ids=" ".join)
def test_every_command_of_the_readme_exists(words: list[str]) -> None:
    if words[0] == "make":
        assert {word for word in words[1:] if word != "&"} <= make_targets()
    elif words[0] in ("mem", ".venv/bin/mem"):
        arguments = build_parser().parse_args([word for word in words[1:] if word != "&"])
        request = getattr(arguments, "request", None)
        assert request is None or (ROOT / request).is_file(), f"{request} is not in the repository"
    elif words[0] == ".venv/bin/python":
        assert (ROOT / words[1]).is_file(), f"{words[1]} is not in the repository"
    elif words[:2] == [".venv/bin/pip", "install"]:
        extra = words[-1].removeprefix(".[").removesuffix("]")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert extra in project["optional-dependencies"], f"{extra} is no extra of this project"
    else:
        assert words[0] in SHELL_WORDS


def test_the_readme_has_the_two_commands_of_a_newcomer() -> None:
    commands = [" ".join(words) for words in readme_commands()]
    assert "make demo" in commands
    assert "make test" in commands


def test_the_readme_s_request_is_one_and_its_field_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert build_request(yaml.safe_load(block)).run_id == "my-run"
    table = text.split("| field | what it says | default |")[1].split("\n\n")[0]
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", table)
    assert len(named) > 8
    assert set(named) <= {path for path, _ in known_fields()}


def test_the_readme_s_exit_codes_are_those_of_the_error_tree() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| exit code |")[1].split("\n\n")[0]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert told == {0} | {error.exit_code for error in MemError.__subclasses__()}


def test_the_demo_trains_a_thousand_steps_on_real_text() -> None:
    demo = load_request(str(ROOT / "deployments" / "demo.yaml"), [])
    assert demo.training.max_steps >= 1_000
    assert demo.data.train == ("stdlib:",)
    assert "mem train deployments/demo.yaml" in (ROOT / "Makefile").read_text()


def test_no_tracked_file_names_a_place_on_one_machine() -> None:
    found = []
    for name in tracked_files():
        if not name.endswith(BINARY):
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            found += [f"{name}:{text.count(chr(10), 0, match.start()) + 1}" for match in MACHINE_PATHS.finditer(text)]
    assert found == []


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-") for requirement in requirements}


def test_every_requirement_has_a_tested_version_and_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == [], "exact versions, no local ones"
    asked = _names(project["dependencies"]) | _names(project["optional-dependencies"]["dev"])
    assert asked - _names(lines) == set()


def test_ci_runs_what_people_run() -> None:
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("make test")
    assert {"setup", "demo", "test", "test-all", "lint", "bench"} <= make_targets()


def test_every_package_says_what_lives_there_who_calls_it_and_what_never_happens() -> None:
    silent = []
    for name in python_files("mem_core", "flows", "tasks"):
        text = ast.get_docstring(tree_of(name)) or ""
        if name.endswith("__init__.py") and (len(text) < 80 or "by" not in text.lower().split() or len(text.split(". ")) < 2):
            silent.append(name)
    assert silent == []


@pytest.mark.parametrize("page", ["mem_core/README.md", "mem_core/INVARIANTS.md", "tests/README.md"])
def test_every_path_on_a_page_for_contributors_exists(page: str) -> None:
    """A path begins at the root where its first folder stands there, else in the page's own folder."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.(?:py|yaml|md|json))`", text))
    at = {name: ROOT / name if (ROOT / name.split("/", 1)[0]).is_dir() else (ROOT / page).parent / name for name in named}
    assert [name for name, path in at.items() if not path.is_file()] == []
    assert len(named) > 5
