"""The script that tries the ends of the version ranges: which versions it takes for the ends."""

from collections.abc import Sequence

import pytest
from packaging.specifiers import SpecifierSet
from range_ends import End, allowed_versions, ends_of, main, versions_listed

ANSWER = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.14.0rc1, 2.13.0+cpu, 2.13.0, 2.12.1, 2.9.0\n  INSTALLED: 2.13.0\n"


def test_the_ends_are_the_lowest_and_the_highest_that_the_index_has() -> None:
    versions = versions_listed(ANSWER)
    assert versions == ["2.15.0", "2.14.1", "2.14.0rc1", "2.13.0", "2.12.1", "2.9.0"]
    assert ends_of("torch", SpecifierSet(">=2.12,<2.15"), versions) == [End("torch", "low", "2.12.1"), End("torch", "high", "2.14.1")]
    assert ends_of("torch", SpecifierSet(">=2.9,<2.10"), versions) == [End("torch", "low", "2.9.0")]
    assert ends_of("torch", SpecifierSet(">=3"), versions) == []
    assert versions_listed("ERROR: no such package") == []


def test_what_would_be_tried_is_listed_and_a_range_without_versions_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def index(*words: str) -> str:
        return ANSWER if words[-1] == "torch" else ""

    def said(*arguments: str) -> tuple[int, Sequence[str]]:
        return main(["--list", *arguments], ask=index), capsys.readouterr().out.split("\n")

    code, lines = said("--package", "torch")
    assert (code, lines[0]) == (0, f"torch 2.12.1 (low end of {allowed_versions('torch')})")
    code, lines = said()
    assert (code, [line.split(":")[1] for line in lines if line.startswith("not good")]) == (1, [" transformers", " prefect"])
