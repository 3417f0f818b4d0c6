"""Which served deployments are paused, and by whom: what a person paused stays so, what `mem serve` paused when it ended goes on.

Both look alike on the server, so `mem serve` keeps the names of those that it paused itself in a variable beside them.
"""

from collections.abc import Iterable
from typing import Any, Protocol
from uuid import UUID

from prefect.client.schemas.actions import VariableCreate, VariableUpdate
from prefect.exceptions import ObjectNotFound

OURS = "mem_serve_paused"


class Deployments(Protocol):
    """What is asked of Prefect's client."""

    def read_deployment_by_name(self, name: str) -> Any:
        """Raises ObjectNotFound."""
        ...

    def pause_deployment(self, deployment_id: UUID | str) -> None:
        """No schedule of it runs, and nobody can start it, until it is resumed."""
        ...

    def read_variable_by_name(self, name: str) -> Any:
        """None where there is none."""
        ...

    def create_variable(self, variable: VariableCreate) -> Any:
        """Make it."""
        ...

    def update_variable(self, variable: VariableUpdate) -> None:
        """Change it."""
        ...


def paused_by_people(client: Deployments, names: Iterable[str]) -> tuple[str, ...]:
    """FLOW/DEPLOYMENT of each that somebody paused. From here on every pause that is found is somebody's.

    A server that never kept such a variable was left by a version that paused all deployments when it ended: none counts as a person's.
    """
    names, kept = tuple(names), client.read_variable_by_name(OURS)
    ours = names if kept is None else kept.value if isinstance(kept.value, list) else ()
    found = tuple(name for name in names if name not in ours and _is_paused(client, name))
    _keep(client, ())
    return found


def pause_while_away(client: Deployments, names: Iterable[str]) -> None:
    """When `mem serve` ends: nothing is scheduled that nobody would run. Those that people paused stay theirs."""
    running = [name for name in names if not _is_paused(client, name)]
    _keep(client, running)
    for name in running:
        client.pause_deployment(client.read_deployment_by_name(name).id)


def _is_paused(client: Deployments, name: str) -> bool:
    try:
        return bool(client.read_deployment_by_name(name).paused)
    except ObjectNotFound:
        return False


def _keep(client: Deployments, names: Iterable[str]) -> None:
    value = [*names]
    if client.read_variable_by_name(OURS) is None:
        client.create_variable(VariableCreate(name=OURS, value=value))
    else:
        client.update_variable(VariableUpdate(name=OURS, value=value))
