"""The doctor's answer is training's answer: the same exit code and the same words, over a table of odd requests (`odd_requests.py`)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from odd_requests import ALL, QUICK, Odd

from mem_core.bootstrap import examine_deeply
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.domain.errors import MemError
from mem_core.domain.run import RunResult
from mem_core.infrastructure.request.file import build_request, parse_request
from mem_core.infrastructure.settings import Settings

pytestmark = pytest.mark.integration
Drive = Callable[..., RunResult]
Answer = tuple[int, str]


def doctors_answer(values: dict[str, Any], settings: Settings) -> Answer:
    """Exit code of `mem doctor`, and what it says."""
    try:
        report = examine_deeply(parse_request(values), settings)
    except MemError as exc:
        return exc.exit_code, str(exc)
    error = error_of(report)
    if error is not None:
        return error.exit_code, str(error)
    return 0, "\n".join(finding.observed for finding in report.findings if finding.severity != "ok")


def trainings_answer(values: dict[str, Any], settings: Settings, drive: Drive) -> Answer:
    """Exit code of `mem train`, and its last words."""
    try:
        result = drive(build_request(values), settings=settings)
    except MemError as exc:
        return exc.exit_code, str(exc)
    return (0, "") if result.status == "completed" else (result.exit_code, result.message)


def values_of(odd: Odd, folder: Path) -> dict[str, Any]:
    """One step of the smallest model, unless the case says otherwise."""
    made = odd.make(folder)
    training = {"max_steps": 1, "segment_steps": 1, "global_batch_size": 4, "warmup_steps": 0, **made.pop("training", {})}
    data = {"validation": None, "sequence_length": 64, **made.pop("data", {})}
    return {"run_id": "odd", "store": str(folder / "runs"), "device": "cpu", "training": training, "data": data, **made}


def assert_the_same_answer(odd: Odd, folder: Path, drive: Drive) -> None:
    values, settings = values_of(odd, folder), Settings.from_environment(dict(os.environ) | odd.environ(folder))
    if odd.spoil is not None:
        drive(build_request(values | {"training": values["training"] | {"learning_rate": 0.002}}), settings=settings)
        odd.spoil(folder / "runs" / "odd")
    before = sorted(folder.rglob("*"))
    code, words = doctors_answer(values, settings)
    assert sorted(folder.rglob("*")) == before, "the doctor changes nothing"
    trained_code, trained_words = trainings_answer(values, settings, drive)
    assert (code, trained_code) == (odd.code, odd.code), f"doctor: {words}\ntraining: {trained_words}"
    assert odd.words in words
    assert not odd.code or odd.words in trained_words


@pytest.mark.parametrize("odd", QUICK, ids=lambda odd: odd.name)
def test_eight_odd_requests(odd: Odd, tmp_path: Path, drive: Drive) -> None:
    """Of each kind one."""
    assert_the_same_answer(odd, tmp_path, drive)


@pytest.mark.slow
@pytest.mark.parametrize("odd", ALL, ids=lambda odd: odd.name)
def test_all_odd_requests(odd: Odd, tmp_path: Path, drive: Drive) -> None:
    """The whole table."""
    assert_the_same_answer(odd, tmp_path, drive)


def test_the_table_is_as_large_as_it_claims() -> None:
    """Eight that CI tries, forty and more in all, each under a name of its own."""
    assert len(QUICK) == 8
    assert len({odd.name for odd in ALL}) == len(ALL) >= 40
    assert {odd.code for odd in ALL} >= {0, 64, 66, 69, 73, 74, 80}
