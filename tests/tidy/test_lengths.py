"""Files and functions stay short. What is longer today is written down in lengths.json and may only shrink.

After shortening one, lower or remove its line. Nothing new is added there without a decision record.
"""

import json
from pathlib import Path
from statistics import median

from source_tree import ROOT, functions_of, python_files

RECORDED: dict[str, dict[str, int]] = json.loads(Path(__file__).with_name("lengths.json").read_text())
MAX_FILE_LINES = 300
MAX_TEST_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
PRODUCT = ("mem_core", "flows", "tasks")


def file_lengths() -> dict[str, int]:
    return {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in python_files(*PRODUCT, "tests")}


def function_lengths() -> dict[str, int]:
    return {
        f"{name}::{function}": (node.end_lineno or 0) - node.lineno + 1
        for name in python_files(*PRODUCT, "tests")
        for function, node in functions_of(name)
    }


def limit_of(name: str) -> int:
    return MAX_TEST_FILE_LINES if name.startswith("tests/") else MAX_FILE_LINES


def test_no_file_is_longer_than_its_limit() -> None:
    allowed = RECORDED["files"]
    assert {name: lines for name, lines in file_lengths().items() if lines > max(limit_of(name), allowed.get(name, 0))} == {}


def test_no_function_is_longer_than_its_limit() -> None:
    allowed = RECORDED["functions"]
    assert {name: lines for name, lines in function_lengths().items() if lines > max(MAX_FUNCTION_LINES, allowed.get(name, 0))} == {}


def test_the_record_holds_no_line_that_is_not_needed_any_more() -> None:
    files, functions = file_lengths(), function_lengths()
    assert [name for name in RECORDED["files"] if files.get(name, 0) <= limit_of(name)] == []
    assert [name for name in RECORDED["functions"] if functions.get(name, 0) <= MAX_FUNCTION_LINES] == []


def test_most_functions_are_short() -> None:
    lengths = [lines for name, lines in function_lengths().items() if not name.startswith("tests/")]
    assert median(lengths) <= 10
    assert sum(lines <= 15 for lines in lengths) > 0.75 * len(lengths)
