"""What a later request may change about a run: more steps, what is kept, limits, policy; never what decides the weights."""

from typing import Any

import pytest

from mem_core.core.run.reconcile import reconcile
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest


def request(**sections: Any) -> RuntimeRequest:
    return RuntimeRequest.model_validate({"run_id": "run", "training": {"max_steps": 100}} | sections)


def born(**sections: Any) -> RuntimeRequest:
    """As run.json holds it: the schedule's horizon was frozen at birth."""
    asked = request(**sections)
    horizon = asked.training.schedule_steps or asked.training.max_steps
    return asked.model_copy(update={"training": asked.training.model_copy(update={"schedule_steps": horizon})})


ALLOWED: list[dict[str, Any]] = [
    {"training": {"max_steps": 200}},
    {"training": {"max_steps": 100, "segment_steps": 7}},
    {"store": "/elsewhere"},
    {"checkpoint": {"keep_last": 9, "every_s": 60}},
    {"resilience": {"max_failures_without_progress": 9}},
    {"policy": {"planner": {"kind": "rules"}}},
    {"memory": {"mode": "fixed", "high_watermark": 0.8}},
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("training.seed", {"training": {"max_steps": 100, "seed": 1}}),
    ("training.learning_rate", {"training": {"max_steps": 100, "learning_rate": 1e-4}}),
    ("training.global_batch_size", {"training": {"max_steps": 100, "global_batch_size": 16}}),
    ("training.schedule_steps", {"training": {"max_steps": 100, "schedule_steps": 50}}),
    ("model.source", {"model": {"source": "preset:llama-tiny"}}),
    ("data.sequence_length", {"data": {"sequence_length": 64}}),
    ("data.train", {"data": {"train": ["other.txt"]}}),
    ("parallel.zero_stage", {"parallel": {"zero_stage": 2}}),
    ("memory.micro_batch_size", {"memory": {"micro_batch_size": 2}}),
    ("deepspeed.aio", {"deepspeed": {"aio": {"block_size": 1}}}),
]


@pytest.mark.parametrize("sections", ALLOWED, ids=str)
def test_what_does_not_decide_the_weights_may_change(sections: dict[str, Any]) -> None:
    going_on = reconcile(born(), request(**sections))
    assert going_on.training.schedule_steps == 100, "the horizon stays as it was at birth"
    without_horizon = going_on.model_dump() | {"training": going_on.training.model_dump() | {"schedule_steps": None}}
    assert without_horizon == request(**sections).model_dump()


@pytest.mark.parametrize(("field", "sections"), REFUSED, ids=lambda item: item if isinstance(item, str) else "")
def test_what_decides_the_weights_may_not(field: str, sections: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        reconcile(born(), request(**sections))
    assert caught.value.exit_code == 64
    assert caught.value.field == field
    assert "new run_id" in caught.value.remedy


def test_an_offload_that_was_never_done_may_be_taken_back() -> None:
    """At ZeRO stage 0 it was accepted and left out; it is refused now, so the run has to be able to go on without the word."""
    before = {"parallel": {"zero_stage": 0, "offload_optimizer": "cpu"}}
    assert reconcile(born(**before), request(parallel={"zero_stage": 0})).parallel.offload_optimizer == "none"
    with pytest.raises(RequestError, match=r"parallel\.offload_optimizer"):
        reconcile(born(parallel={"zero_stage": 1, "offload_optimizer": "cpu"}), request())


def test_a_conversion_is_offered_only_where_there_is_one() -> None:
    with pytest.raises(RequestError, match="--allow-reshard"):
        reconcile(born(), request(parallel={"zero_stage": 2}))
    with pytest.raises(RequestError) as caught:
        reconcile(born(), request(parallel={"zero_stage": 0}))
    assert "--allow-reshard" not in str(caught.value)


def test_the_horizon_of_birth_may_be_named_again() -> None:
    asked = request(training={"max_steps": 300, "schedule_steps": 100})
    assert reconcile(born(), asked) == asked
