"""The runbook names every kind of error with its exit code, and every command in it exists."""

import inspect
import re
import shlex
from pathlib import Path

import pytest

from flows.cli import build_parser
from mem_core.domain import errors
from mem_core.domain.errors import MemError

TEXT = (Path(__file__).parents[2] / "deployments" / "RUNBOOK.md").read_text()
KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MemError) and kind is not MemError]
CODE = re.findall(r"`([^`\n]+)`", TEXT)
PREFECT_VERBS = {"deployment", "flow-run", "work-pool", "worker", "deploy", "config"}


def commands(program: str) -> list[list[str]]:
    return [words for text in CODE if text.startswith(f"{program} ") and (words := shlex.split(text))]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_heading_with_its_exit_code(kind: type[MemError]) -> None:
    section = re.search(rf"^### {kind.__name__}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert section.group(1).startswith(f"Exit {kind.exit_code}")
    assert "`" in section.group(1) or "same command" in section.group(1), "it says what to do"


@pytest.mark.parametrize("words", commands("mem"), ids=" ".join)
def test_every_mem_command_parses(words: list[str]) -> None:
    assert build_parser().parse_args(words[1:]).verb == words[1]


def test_every_prefect_command_is_one() -> None:
    found = commands("prefect")
    assert {next(word for word in words[1:] if not word.startswith("-")) for words in found} <= PREFECT_VERBS
    assert len(found) >= 8


def test_every_file_and_module_named_is_there() -> None:
    root = Path(__file__).parents[2]
    for words in commands("python"):
        assert (root / Path(*words[2].split(".")).with_suffix(".py")).exists()
        assert (root / words[3]).exists()
    for words in commands("prefect"):
        assert all((root / word).exists() for word in words if word.startswith("deployments/"))
