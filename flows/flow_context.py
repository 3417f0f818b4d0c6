"""What a flow asks Prefect about its own run."""

import time
from typing import Any

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

from flows.flow_request import settled_request
from mem_core.bootstrap import RunDraft
from mem_core.domain.errors import MemError
from mem_core.domain.request import RuntimeRequest


def is_deployed() -> bool:
    """Whether this flow run came from a deployment, so that nobody sees the folder that it runs in."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


def first_start_unix_s() -> float:
    """When this flow run first started: the same for each retry of it."""
    context = FlowRunContext.get()
    start = context.flow_run.start_time if context is not None and context.flow_run is not None else None
    return start.timestamp() if start is not None else time.time()


def request_of_run(request: RuntimeRequest, overrides: dict[str, Any] | None) -> RuntimeRequest:
    """The request of the current flow run. Raises RequestError."""
    return settled_request(request, overrides, deployed=is_deployed(), start_unix_s=first_start_unix_s())


def flow_run_name() -> str:
    """The run id as the name of the flow run; a request that is wrong keeps the parameter's own words."""
    context = FlowRunContext.get()
    parameters = (context.parameters if context is not None else None) or {}
    request, overrides = parameters.get("request"), parameters.get("overrides")
    if not isinstance(request, RuntimeRequest):
        return "mem"
    try:
        return settled_request(request, overrides, deployed=False, start_unix_s=first_start_unix_s()).run_id
    except MemError:
        return request.run_id


def finetune_run_name() -> str:
    """As for the endurance flow, from the plain parameter."""
    context = FlowRunContext.get()
    parameters = (context.parameters if context is not None else None) or {}
    overridden = (parameters.get("overrides") or {}).get("run_id")
    return str(overridden or parameters.get("run_id") or "mem")


def doctor_run_name() -> str:
    """Told apart from the run that it examines for."""
    return f"doctor-{flow_run_name()}"


def show_in_prefect(draft: RunDraft) -> None:
    """Put Prefect's UI behind the draft's progress, where somebody can look at it. Call inside the flow, before the run opens."""
    from prefect.settings import PREFECT_API_URL

    from flows.local_api import is_embedded
    from flows.prefect_view.api import PrefectApi
    from flows.prefect_view.board import RunBoard
    from flows.prefect_view.publisher import Pace, PrefectView

    context = FlowRunContext.get()
    if context is None or context.flow_run is None or is_embedded(PREFECT_API_URL.value()):
        return
    flow_run, request = context.flow_run, draft.request
    deployed = flow_run.deployment_id is not None
    draft.progress = PrefectView(
        inner=draft.progress,
        api=PrefectApi(flow_run.id, request.run_id, set(flow_run.tags)),
        board=RunBoard(request.run_id, request.training.max_steps),
        log=get_run_logger(),
        ask_to_stop=lambda reason: ask_to_stop(draft, reason),
        # A runner or worker sends a signal; without one, only the flow run's state tells of a cancel.
        pace=Pace(poll_s=10.0 if deployed else 2.0),
    ).start()


def ask_to_stop(draft: RunDraft, reason: str) -> None:
    """Stop at the next step; before there are steps, at once, by the signal that the flow handles anyway."""
    from tasks.running import interrupt_opening

    draft.stop.by = draft.stop.by or reason
    if draft.session is None:
        interrupt_opening()
