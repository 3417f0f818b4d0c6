"""The job templates pass Prefect's own checks; what could not be run here is at least what its workers understand."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prefect.server.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values, find_placeholders

FOLDER = Path(__file__).parents[2] / "deployments" / "job_templates"
# Beside the fields of the default template; documented by prefect-docker.
KNOWN_BESIDE = {"docker": {"container_create_kwargs"}, "kubernetes": set[str]()}
CASES = [("docker", "docker_gpu.json"), ("kubernetes", "kubernetes_gpu.json")]


def template_of(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text())


def default_of(kind: str) -> dict[str, Any]:
    """Prefect's own template for that kind of worker, as its server ships it."""
    text = (files("prefect.server.api") / "collections_data" / "views" / "aggregate-worker-metadata.json").read_text()
    return json.loads(text)[f"prefect-{kind}"][kind]["default_base_job_configuration"]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_server_accepts_the_template(kind: str, name: str) -> None:
    assert WorkPoolCreate(name="pool", type=kind, base_job_template=template_of(name)).type == kind


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_variable_is_used_and_its_default_fits(kind: str, name: str) -> None:
    template = template_of(name)
    schema = template["variables"]
    jsonschema.Draft202012Validator.check_schema(schema)
    used = {placeholder.name for placeholder in find_placeholders(json.dumps(template["job_configuration"]))}
    assert used == set(schema["properties"])
    defaults = {key: value["default"] for key, value in schema["properties"].items() if "default" in value}
    jsonschema.validate(defaults, schema)
    assert "{{" not in json.dumps(apply_values(template["job_configuration"], defaults, remove_notset=True))


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_worker_knows_every_field(kind: str, name: str) -> None:
    assert set(template_of(name)["job_configuration"]) - set(default_of(kind)["job_configuration"]) <= KNOWN_BESIDE[kind]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_variables_of_the_same_name_have_the_type_that_the_worker_expects(kind: str, name: str) -> None:
    ours, theirs = template_of(name)["variables"]["properties"], default_of(kind)["variables"]["properties"]
    assert {key: ours[key]["type"] for key in ours.keys() & theirs.keys() if "type" in theirs[key]} == {
        key: theirs[key]["type"] for key in ours.keys() & theirs.keys() if "type" in theirs[key]
    }


def test_a_pod_has_shared_memory_scratch_and_time_to_commit() -> None:
    pod = template_of("kubernetes_gpu.json")["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(mounts) == {"/dev/shm", "/scratch"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts.values())
    assert template_of("kubernetes_gpu.json")["variables"]["properties"]["grace_period_seconds"]["default"] >= 30


def test_the_image_is_made_of_what_is_in_the_repository() -> None:
    """Docker is not at hand; but what it copies is there, what it runs is how MEM is installed, and no environment is sent along."""
    root = FOLDER.parents[1]
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    copied = [line.split()[1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert copied == [".", "constraints.txt"]
    assert all((root / name).exists() for name in copied)
    assert [line.split()[0] for line in lines].count("FROM") == 2
    assert {".venv*", ".git"} <= set((FOLDER / "Dockerfile.dockerignore").read_text().split())


def test_a_workers_command_is_run_as_it_is() -> None:
    """Docker and Kubernetes put it behind an image's entrypoint: `mem prefect flow-run execute` is no command."""
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith(("ENTRYPOINT", "CMD"))] == ['CMD ["mem", "--help"]']
    job = template_of("kubernetes_gpu.json")["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"][0]
    assert (job["args"], "command" in job) == ("{{ command }}", False)
    assert template_of("docker_gpu.json")["job_configuration"]["command"] == "{{ command }}"


def test_a_pod_holds_no_field_of_the_job_around_it() -> None:
    """Kubernetes refuses or drops what it does not know where it stands."""
    spec = template_of("kubernetes_gpu.json")["job_configuration"]["job_manifest"]["spec"]
    assert {"completions", "parallelism", "backoffLimit"} <= set(spec)
    assert {"completions", "parallelism", "backoffLimit", "ttlSecondsAfterFinished"} & set(spec["template"]["spec"]) == set()
