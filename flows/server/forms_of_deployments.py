"""The forms for people on deployments that `prefect deploy` made: Prefect makes them from the functions alone, and `mem serve` by itself
already right. Done beside the automations, once the deployments are there: `python -m flows.automations deployments/automations.yaml`."""

from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.exceptions import ObjectNotFound

from flows.server.serve import DEPLOYMENTS_FILE, load_flow, name_of, read_deployments


def apply_forms(file: Path = DEPLOYMENTS_FILE) -> list[str]:
    """Give each deployment of the file that the server has its form; one line for each about that."""
    with get_client(sync_client=True) as client:
        return [line for entry in read_deployments(file) for line in _apply(client, entry["entrypoint"], name_of(entry))]


def _apply(client: SyncPrefectClient, entrypoint: str, name: str) -> list[str]:
    try:
        deployment = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return []
    client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=load_flow(entrypoint).parameters.model_dump()))
    return [f"{name}: its form is up to date"]
