"""What is wrong with a flow's parameters is said in MEM's words: field, value, bound."""

from typing import Any

import pytest

from flows.finetune_flow import finetune
from flows.mem_flow import MemFlow
from mem_core.domain.errors import RequestError
from mem_core.domain.run import RunResult


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"learning_rate": 99.0},
            r"^learning_rate: must be less than or equal to 10 \(got 99.0\); allowed: a number, null \(> 0 and <= 10\)",
        ),
        ({"run_id": "Bad Name!"}, r"^run_id: does not have the right form \(got 'Bad Name!'\)"),
        ({"method": "qlora"}, r"^method: is not one of the known values \(got 'qlora'\); allowed: full or lora"),
        (
            {"epochs": 0, "sequence_length": 1},
            r"^epochs: must be greater than 0 \(got 0\).*sequence_length: must be greater than or equal to 2",
        ),
    ],
)
def test_a_wrong_parameter_is_named_with_value_and_bound(given: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        finetune.validate_parameters({"run_id": "run", "model": "preset:llama-nano", **given})


@pytest.mark.parametrize(
    ("given", "words"),
    [({"run_id": "run"}, "missing a required argument: 'model'"), ({"run_id": "run", "modle": "x"}, "unexpected keyword argument 'modle'")],
)
def test_a_missing_or_unknown_parameter_is_named_before_any_server_is_started(given: dict[str, Any], words: str) -> None:
    if "modle" in given:
        given = {**given, "model": "preset:llama-nano"}
    with pytest.raises(RequestError, match=words):
        finetune(**given)


def test_a_complete_run_is_answered_from_its_journal_alone() -> None:
    """Called with a prior run's parameters: `answer` is asked, and nothing else happens."""
    asked: list[Any] = []

    def answer(parameters: Any) -> RunResult:
        asked.append(parameters)
        return RunResult(status="completed", run_id="run", applied_steps=3)

    def never(run_id: str, steps: int = 3) -> None:
        raise AssertionError("it was run")

    result = MemFlow(never, answer, name="never", validate_parameters=True)("run", wait_for=[])
    assert (result.applied_steps, asked) == (3, [{"run_id": "run", "steps": 3}])
