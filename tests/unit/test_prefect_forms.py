"""The forms of Prefect's UI: a short first screen, names for people, and bounds that the form itself holds."""

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import ValidationError, validate
from prefect.utilities.callables import parameter_schema
from prefect.utilities.names import generate_slug

from flows.chaos_drill_flow import chaos_drill
from flows.doctor_flow import doctor
from flows.endurance_flow import endurance
from flows.finetune_flow import finetune
from flows.flow_request import FirstFields, name_beside, run_id_in, settled_request
from flows.generate_flow import generate
from flows.restore_drill_flow import restore_drill
from flows.server.serve import DEPLOYMENTS_FILE, load_flow, read_deployments, to_deployment
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest

FLOWS = [endurance, finetune, chaos_drill, restore_drill, doctor, generate]
SHORT = ["Run id", "Model", "Data", "Max steps", "Global batch size", "Learning rate"]
BASE = {"run_id": "a", "store": "/runs"}


def form(flow: Any) -> dict[str, Any]:
    return flow.parameters.model_dump_for_openapi()


def shown(flow: Any) -> list[str]:
    """The titles in the order in which the form has them."""
    return [field["title"] for field in sorted(form(flow)["properties"].values(), key=lambda field: field["position"])]


def kinds(schema: Any) -> Iterator[dict[str, Any]]:
    """Every tab that any field offers."""
    if isinstance(schema, dict):
        yield from schema.get("anyOf", ())
        for value in schema.values():
            yield from kinds(value)


def fields(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield from (schema.get("properties") or {}).values()
        for value in schema.values():
            yield from fields(value)


def test_the_first_screen_is_short_and_everything_else_is_advanced() -> None:
    assert shown(endurance)[: len(SHORT)] == SHORT
    assert all(title.startswith("Advanced: ") for title in shown(endurance)[len(SHORT) :])
    assert [title for title in shown(finetune) if not title.startswith("Advanced: ")] == [*SHORT[:4], "Epochs", *SHORT[4:]]
    assert (shown(chaos_drill)[0], shown(restore_drill)[:2]) == ("Seed", ["Run id", "Level"])
    assert shown(doctor) == ["Request", "Overrides"], "nothing is advanced where nothing comes first"


def test_a_field_can_be_typed_into_at_once_and_may_be_left_empty() -> None:
    """Of its tabs the one that takes a value comes first, and nothing is sent for it beforehand."""
    field = form(endurance)["properties"]["learning_rate"]
    assert [kind["title"] for kind in field["anyOf"]] == ["number", "not set"]
    assert "default" not in field
    assert form(endurance)["required"] == ["request"]
    for field in form(finetune)["properties"].values():
        assert (field.get("anyOf", [{}])[0].get("type") != "null", field.get("default", "none") is not None) == (True, True)


def test_what_happens_to_an_empty_field_is_said() -> None:
    """The form shows a docstring's words, which must not know less than the signature's."""
    said = {name: field["description"] for name, field in form(finetune)["properties"].items()}
    assert ("2e-5" in said["learning_rate"], "3" in said["epochs"]) == (True, True)


def test_the_sections_of_a_request_are_folded() -> None:
    request = form(endurance)["definitions"]["RuntimeRequest"]["properties"]
    for name in ("model", "data", "training", "parallel", "memory", "checkpoint", "policy", "resilience", "evaluation"):
        assert ([kind["title"] for kind in request[name]["anyOf"]], request[name]["default"]) == (["as usual", "set"], None)
    assert max(request.values(), key=lambda field: field["position"])["title"] == "Schema version"


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_every_tab_and_title_is_for_people(flow: Any) -> None:
    assert all(kind.get("title") for kind in kinds(form(flow)))
    titles = [field["title"] for field in fields(form(flow))]
    assert [title for title in titles if "_" in title or "Section" in title or title != title.strip() or not title] == []


def test_names_that_nobody_would_guess_have_words() -> None:
    definitions = form(endurance)["definitions"]
    assert definitions["ModelSection"]["properties"]["lora"]["title"] == definitions["LoraSection"]["title"] == "LoRA"
    assert definitions["ParallelSection"]["properties"]["zero_stage"]["title"] == "ZeRO stage"
    assert definitions["ResilienceSection"]["properties"]["segment_deadline_s"]["title"] == "Segment deadline (s)"
    assert definitions["RuntimeRequest"]["properties"]["checkpoint"]["title"] == "Checkpoints", "what somebody chose stays"


@pytest.mark.parametrize(
    "wrong",
    [
        {"run_id": "Bad Name!"}, {"learning_rate": 99}, {"max_steps": 0}, {"model": ""}, {"global_batch_size": 0},
        {"request": {**BASE, "run_id": "Bad Name!"}}, {"request": {**BASE, "training": {"learning_rate": 99}}},
    ],
    ids=str,
)  # fmt: skip
def test_the_form_itself_refuses_what_the_request_would(wrong: dict[str, Any]) -> None:
    validate({"request": BASE}, form(endurance))
    with pytest.raises(ValidationError):
        validate({"request": BASE, **wrong}, form(endurance))


def test_a_drills_form_refuses_a_name_that_no_run_has() -> None:
    validate({"run_id": "a"}, form(restore_drill))
    with pytest.raises(ValidationError):
        validate({"run_id": "Bad Name!"}, form(restore_drill))


def test_what_a_flow_takes_its_form_takes() -> None:
    """Names, types and what is required are the flow's own; requests are submitted from elsewhere than forms, too."""
    whole = RuntimeRequest.model_validate({**BASE, "model": {"lora": {}}, "chaos": {"at_steps": [1]}}).model_dump(mode="json")
    for flow in (endurance, chaos_drill, doctor):
        raw, made = parameter_schema(flow.fn), flow.parameters
        assert (made.properties.keys(), made.required) == (raw.properties.keys(), raw.required)
        assert {name: set(schema["properties"]) for name, schema in made.definitions.items()} == {
            name: set(schema["properties"]) for name, schema in raw.definitions.items()
        }
        for request in (whole, BASE, {**BASE, "training": {"max_steps": 3}}):
            validate({"request": request}, form(flow))
    validate({"request": BASE, "run_id": None, "learning_rate": None}, form(endurance))


def test_a_section_that_the_form_leaves_as_usual_has_its_defaults() -> None:
    """The form sends null for it; so does no YAML file, where null is a mistake."""
    values = {**BASE, "training": None, "memory": None, "chaos": None}
    validate({"request": values}, form(endurance))
    request = endurance.validate_parameters({"request": values, "overrides": {}})["request"]
    assert request == RuntimeRequest.model_validate(BASE)
    with pytest.raises(RequestError, match="store"):
        endurance.validate_parameters({"request": {**BASE, "store": None}, "overrides": {}})


def test_every_deployment_shows_the_flows_form_and_fits_it() -> None:
    for entry in read_deployments(DEPLOYMENTS_FILE):
        schema = to_deployment(entry)._parameter_openapi_schema.model_dump_for_openapi()
        assert schema == form(load_flow(entry["entrypoint"]))
        needed = {"model": "preset:llama-nano"} if entry["name"] == "finetune" else {}
        if entry["name"] != "restart":
            validate({**entry["parameters"], **needed}, schema)


def test_first_fields_win_over_the_request_and_overrides_over_both() -> None:
    first = FirstFields(run_id="b", model="preset:llama-tiny", data=["x.txt"], max_steps=7, global_batch_size=4, learning_rate=1e-5)
    request = settled_request(
        RuntimeRequest.model_validate(BASE), {**first.overrides(), "training.max_steps": 9}, deployed=True, start_unix_s=0.0
    )
    got = (request.run_id, request.model.source, request.data.train, request.training.global_batch_size, request.training.learning_rate)
    assert got == ("b", "preset:llama-tiny", ("x.txt",), 4, 1e-5)
    assert (request.training.max_steps, request.store) == (9, "/runs")
    assert FirstFields().overrides() == {}


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("", "a"), ("a", "a"), (generate_slug(2), "a"), ("rho33-kaldra", "a"), ("Awesome-Meagle", "a"), ("Try 2", "Try 2 (a)"),
        ("my-run", "my-run (a)"), ("Try 2 (a)", "Try 2 (a)"), ("alpha test", "alpha test (a)"),
    ],
)  # fmt: skip
def test_a_run_name_that_somebody_typed_is_kept_beside_the_run_id(typed: str, name: str) -> None:
    assert name_beside(typed, "a") == name
    assert run_id_in(name) == "a"
