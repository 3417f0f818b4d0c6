"""Automations from a file, created or brought up to date by name: `python -m flows.automations deployments/automations.yaml`.

The deployments that are there get their forms for people on the way: `prefect deploy` makes a form from the function alone, while `mem
serve` makes it right by itself.

The file is Prefect's own format, but for one thing: where an action names a block as `type-slug/name` or a deployment as
`flow/deployment`, its id is looked up, and the automation is left out while there is none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_regular_text


def apply_automations(file: Path) -> list[str]:
    """Create or update each automation; returns one line per automation about what was done."""
    entries = yaml.safe_load(read_regular_text(file, RECORD_LIMIT_BYTES))["automations"]
    with get_client(sync_client=True) as client:
        return [_apply(client, entry) for entry in entries]


def _apply(client: SyncPrefectClient, entry: dict[str, Any]) -> str:
    try:
        actions = [_with_ids(client, action) for action in entry["actions"]]
    except ObjectNotFound:
        return f"{entry['name']}: left out, its block or deployment does not exist yet (see deployments/RUNBOOK.md)"
    automation = AutomationCore.model_validate({**entry, "actions": actions})
    found = client.read_automations_by_name(automation.name)
    if found:
        # What a person has switched off or on in the UI stays so.
        client.update_automation(found[0].id, automation.model_copy(update={"enabled": found[0].enabled}))
        return f"{automation.name}: up to date"
    client.create_automation(automation)
    return f"{automation.name}: created"


def _with_ids(client: SyncPrefectClient, action: dict[str, Any]) -> dict[str, Any]:
    """The action with ids in the place of names. Raises ObjectNotFound."""
    block, deployment = action.get("block_document_id"), action.get("deployment_id")
    if isinstance(block, str) and "/" in block:
        slug, _, name = block.partition("/")
        action = {**action, "block_document_id": str(client.read_block_document_by_name(name, slug).id)}
    if isinstance(deployment, str) and "/" in deployment:
        action = {**action, "deployment_id": str(client.read_deployment_by_name(deployment).id)}
    return action


def apply_forms(forms: Mapping[str, dict[str, Any]]) -> list[str]:
    """Give each named deployment that the server has its form; one line for each about that."""
    with get_client(sync_client=True) as client:
        return [line for name, form in forms.items() for line in _apply_form(client, name, form)]


def _apply_form(client: SyncPrefectClient, name: str, form: dict[str, Any]) -> list[str]:
    try:
        deployment = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return []
    client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=form))
    return [f"{name}: its form is up to date"]
