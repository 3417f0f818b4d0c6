"""From a flow's parameters to a request, with MEM's messages; what a deployment may not leave open; crash loops."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from jsonschema import ValidationError, validate

from flows.endurance_flow import endurance
from flows.finetune_flow import LEARNING_RATES, FineTuning, derived_fields, finetune, finetune_request
from flows.flow_request import refuse_relative_store, settled_request
from flows.server.serve import AUTOMATIONS_FILE, DEPLOYMENTS_FILE, load_flow, read_deployments, to_deployment
from mem_core.core.results.length import RunLength, going_on_in_steps
from mem_core.core.run.reconcile import reconcile
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest

REQUEST = RuntimeRequest(run_id="a", store="/tmp/runs")


def settle(overrides: dict[str, Any], deployed: bool = True, start: float = 0.0) -> RuntimeRequest:
    return settled_request(REQUEST, overrides, deployed=deployed, start_unix_s=start)


def test_overrides_win_and_are_validated() -> None:
    assert settle({"training.max_steps": 7}).training.max_steps == 7
    with pytest.raises(RequestError, match=r"training.max_steps: must be greater than or equal to 1 \(got 0\)"):
        settle({"training.max_steps": 0})


def test_a_weekly_run_id_is_the_same_for_late_runs_and_retries_of_one_week() -> None:
    monday, sunday = (time.mktime((2026, 11, day, 12, 0, 0, 0, 0, -1)) for day in (23, 29))
    name = {"run_id": "endurance-{week}"}
    assert settle(name, start=monday).run_id == settle(name, start=sunday).run_id == "endurance-2026-w48"
    assert settle({"run_id": "d-{date}"}, start=monday).run_id == "d-2026-11-23"


@pytest.mark.parametrize("store", ["./runs", "runs", "file://runs", "../x"])
def test_a_deployment_refuses_a_relative_store(store: str) -> None:
    with pytest.raises(RequestError, match="relative store") as caught:
        settle({"store": store})
    assert caught.value.exit_code == 64
    assert settle({"store": store}, deployed=False).store == store


@pytest.mark.parametrize("store", ["/runs", "~/runs", "file:///runs", "s3://bucket/prefix"])
def test_a_deployment_takes_a_store_that_means_one_place(store: str) -> None:
    refuse_relative_store(store)
    assert settle({"store": store}).store == store


def test_wrong_parameters_get_our_message() -> None:
    with pytest.raises(RequestError, match=r"training.max_step.*training.max_steps"):
        endurance.validate_parameters({"request": {"run_id": "a", "training": {"max_step": 1}}, "overrides": {}})
    with pytest.raises(RequestError, match="this is no request"):
        endurance.validate_parameters({"request": 7, "overrides": {}})
    with pytest.raises(RequestError, match="global_batch_size"):
        finetune.validate_parameters({**finetune_values(), "global_batch_size": 0})


def finetune_values() -> dict[str, Any]:
    return {
        "run_id": "a", "model": "preset:llama-nano", "data": "stdlib:", "store": "/runs", "max_steps": 200, "learning_rate": 1e-4,
        "global_batch_size": 8, "sequence_length": 64,
    }  # fmt: skip


def tuning(overrides: Sequence[str] = (), **values: Any) -> RuntimeRequest:
    return finetune_request(FineTuning(**{**finetune_values(), **values}), overrides)


def test_fine_tuning_parameters_become_a_request_with_ten_checkpoints() -> None:
    request = tuning()
    assert (request.training.segment_steps, request.training.warmup_steps, request.data.sequence_length) == (20, 20, 64)
    with pytest.raises(RequestError, match=r"training.learning_rate"):
        tuning(learning_rate=99)


def test_fine_tuning_takes_three_epochs_and_the_rate_of_its_method_where_nothing_is_said() -> None:
    request = finetune_request(FineTuning("a", "preset:llama-nano"))
    assert (request.training.epochs, request.training.warmup_ratio, request.training.learning_rate) == (3.0, 0.1, 2e-5)
    assert LEARNING_RATES["lora"] == 1e-4
    own = tuning(epochs=2, max_steps=None, learning_rate=None)
    assert (own.training.epochs, own.training.learning_rate, own.training.segment_steps) == (2.0, 2e-5, 100)


def test_fine_tuning_hands_fields_and_evaluation_on() -> None:
    request = tuning(prompt_field="question", completion_field="answer", evaluate_every_steps=50, patience=3)
    assert (request.data.prompt_field, request.data.completion_field) == ("question", "answer")
    assert (request.evaluation.every_steps, request.evaluation.keep_best, request.evaluation.patience) == (50, True, 3)
    with pytest.raises(RequestError, match=r"every_steps"):
        tuning(patience=3)


@pytest.mark.parametrize(
    "overrides", [{"training.max_steps": 20}, {"training.epochs": 1}, {"training.warmup_steps": 5}, {"training.warmup_ratio": 0.2}], ids=str
)
def test_what_is_overridden_is_not_derived_beside_it(overrides: dict[str, Any]) -> None:
    """Both of two would be refused, though nobody had set both."""
    request = tuning(tuple(overrides), max_steps=None)
    settled = settled_request(request, overrides, deployed=True, start_unix_s=0.0)
    name, value = next(iter(overrides.items()))
    assert getattr(settled.training, name.removeprefix("training.")) == value


def test_both_lengths_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"epochs 2 and max_steps 200"):
        tuning(epochs=2)


@pytest.mark.parametrize(
    ("name", "value"), [("run_id", "Bad Name!"), ("learning_rate", 99), ("epochs", 0), ("model", ""), ("method", "half"), ("max_steps", 0)]
)
def test_the_form_refuses_what_the_request_would(name: str, value: Any) -> None:
    """Prefect checks a deployment's parameters against this schema before anything is started."""
    schema = finetune.parameters.model_dump_for_openapi() if hasattr(finetune.parameters, "model_dump_for_openapi") else None
    schema = schema or finetune.parameters.model_dump()
    values = {key: value for key, value in finetune_values().items() if key != "max_steps"}
    validate(values, schema)
    with pytest.raises(ValidationError):
        validate({**values, name: value}, schema)
    with pytest.raises(ValidationError, match="model"):
        validate({key: value for key, value in values.items() if key != "model"}, schema)


def test_a_fine_tuning_run_goes_on_with_more_steps_on_the_warm_up_of_its_birth() -> None:
    """The tenth of more steps is another warm-up, which nobody asked for; one that was asked for is held to what it was."""
    born, more = tuning(), tuning(max_steps=900)
    assert (born.training.warmup_steps, more.training.warmup_steps) == (20, 90)
    going_on = reconcile(born, more, as_born=derived_fields({}))
    assert (going_on.training.warmup_steps, going_on.training.max_steps, going_on.training.segment_steps) == (20, 900, 90)
    overrides = {"training.warmup_steps": 7}
    asked = settled_request(tuning(tuple(overrides), max_steps=900), overrides, deployed=True, start_unix_s=0.0)
    with pytest.raises(RequestError, match=r"training.warmup_steps: .*born with 20"):
        reconcile(born, asked, as_born=derived_fields(overrides))


def test_a_fine_tuning_run_that_was_born_in_steps_goes_on_in_epochs() -> None:
    born, more = tuning(), tuning(max_steps=None, epochs=3)
    in_steps = going_on_in_steps(RunLength(num_rows=800), born, more, derived_fields({}))
    going_on = reconcile(born, in_steps, as_born=derived_fields({}))
    assert (going_on.training.warmup_steps, going_on.training.max_steps) == (20, 300)


def test_every_deployment_can_be_served_as_the_file_says() -> None:
    entries = {entry["name"]: entry for entry in read_deployments(DEPLOYMENTS_FILE)}
    assert {"endurance", "finetune", "chaos-drill", "restore-drill", "doctor"} <= set(entries)
    for name, entry in entries.items():
        deployment = to_deployment(entry)
        assert deployment.name == name
        assert deployment.entrypoint == entry["entrypoint"]
        assert deployment.parameters == entry["parameters"]
        assert deployment.concurrency_limit == (1 if name != "restart" else None), "a guard that waits restarts nobody"
        assert [schedule.active for schedule in deployment.schedules or ()] == [False for _ in entry.get("schedules", ())]
        assert load_flow(entry["entrypoint"]).description, "the UI shows what a flow does"


def test_the_stores_of_the_shipped_deployments_are_no_relative_ones() -> None:
    for entry in read_deployments(DEPLOYMENTS_FILE):
        parameters = entry["parameters"]
        if entry["name"] == "restart":
            continue  # it trains nothing
        refuse_relative_store(parameters.get("store") or parameters["request"]["store"])
    assert AUTOMATIONS_FILE.exists()
