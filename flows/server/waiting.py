"""What a flow run that has not started waits for: others that hold its places, or a process that nobody has started."""

import time

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse

AT_WORK = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING, StateType.PAUSED)
POLLED_WITHIN_S = 25.0  # runners and workers ask each 10 s
MOST_NAMED = 5


def waits_for(client: SyncPrefectClient, run: FlowRun) -> str:
    """Who is before it, by name; empty where nobody is, so that it waits for somebody who would run it."""
    if run.deployment_id is None:
        return ""
    deployment = client.read_deployment(run.deployment_id)
    limit = deployment.global_concurrency_limit
    ahead = [other for other in _at_work(client, run, same_deployment=True) if other.start_time is not None]
    if limit is not None and len(ahead) >= limit.limit:
        return f"waits behind {_names(ahead)}: {run_at_a_time(limit.limit)} of this deployment"
    others = [other for other in _at_work(client, run, same_deployment=False) if other.start_time is not None]
    if others and _is_served(deployment):
        return f"waits until the process that serves it has a free place; at work are {_names(others)}"
    return ""


def run_at_a_time(limit: int) -> str:
    """In words."""
    return "one run at a time" if limit == 1 else f"{limit} runs at a time"


def _at_work(client: SyncPrefectClient, run: FlowRun, *, same_deployment: bool) -> list[FlowRun]:
    deployment = FlowRunFilterDeploymentId(any_=[run.deployment_id]) if same_deployment and run.deployment_id is not None else None
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(AT_WORK)))
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state, deployment_id=deployment), limit=50)
    return [other for other in found if other.id != run.id]


def _is_served(deployment: DeploymentResponse) -> bool:
    """Whether a process has asked for work of it just now."""
    return deployment.last_polled is not None and time.time() - deployment.last_polled.timestamp() < POLLED_WITHIN_S


def _names(runs: list[FlowRun]) -> str:
    named = ", ".join(f"{run.name} ({run.state_name})" for run in runs[:MOST_NAMED])
    return named + (f" and {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else "")
