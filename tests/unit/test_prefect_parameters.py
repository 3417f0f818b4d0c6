"""What is wrong with a flow's parameters is said in MEM's words: field, value, bound."""

from typing import Any

import pytest

from flows.finetune_flow import finetune
from mem_core.domain.errors import RequestError


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
