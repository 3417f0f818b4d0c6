"""What a flow asks Prefect about its own run."""

import time
from dataclasses import replace
from typing import Any

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

from flows.flow_request import name_beside, settled_request
from flows.prefect_view.served import remember_store
from mem_core.core.run.fold import fold_state
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.errors import MemError, NoProgress, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.machine.process_facts import refuse_lost_working_folder
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.session.opening.stages import Held, RunOrder
from tasks.running import DRIVEN, DrivenRun

KEY_VARIABLE = "MEM_PLANNER_KEY_FROM_BLOCK"


def is_deployed() -> bool:
    """Whether this flow run came from a deployment, so that nobody sees the folder that it runs in."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None


def first_start_unix_s() -> float:
    """When this flow run first started: the same for each retry of it."""
    context = FlowRunContext.get()
    start = context.flow_run.start_time if context is not None and context.flow_run is not None else None
    return start.timestamp() if start is not None else time.time()


def request_of_run(request: RuntimeRequest, overrides: dict[str, Any] | None, *, refuse: bool = True) -> RuntimeRequest:
    """The request of the current flow run; see `settled_request`.

    Raises:
        RequestError: it is wrong. EnvironmentUnfit: the process stands nowhere any more.
    """
    refuse_lost_working_folder()
    return settled_request(request, overrides, deployed=is_deployed(), start_unix_s=first_start_unix_s(), refuse=refuse)


def flow_run_name() -> str:
    """The run id, beside the name that somebody typed; of a request that is wrong the run id as it was given."""
    return _beside_typed(_run_id(_parameters()))


def finetune_run_name() -> str:
    """As for the endurance flow, from the plain parameter."""
    parameters = _parameters()
    return _beside_typed(str((parameters.get("overrides") or {}).get("run_id") or parameters.get("run_id") or "mem"))


def doctor_run_name() -> str:
    """Told apart from the run that it examines for."""
    return _beside_typed(f"doctor-{_run_id(_parameters())}")


def _parameters() -> dict[str, Any]:
    context = FlowRunContext.get()
    return (context.parameters if context is not None else None) or {}


def _run_id(parameters: dict[str, Any]) -> str:
    request, overrides = parameters.get("request"), parameters.get("overrides") or {}
    if not isinstance(request, RuntimeRequest):
        return "mem"
    first = {"run_id": parameters["run_id"]} if parameters.get("run_id") else {}
    try:
        return settled_request(request, {**first, **overrides}, deployed=False, start_unix_s=first_start_unix_s()).run_id
    except MemError:
        return str(first.get("run_id", request.run_id))


def _beside_typed(run_id: str) -> str:
    context = FlowRunContext.get()
    return name_beside(context.flow_run.name if context is not None and context.flow_run is not None else "", run_id)


def shown_in_prefect(order: RunOrder) -> RunOrder:
    """The order with Prefect's UI behind its progress, where somebody can look at it. Call inside the flow, before the run opens."""
    from prefect.settings import PREFECT_API_URL

    from flows.prefect_view.api import PrefectApi
    from flows.prefect_view.board import RunBoard
    from flows.prefect_view.publisher import Pace, PrefectView
    from flows.server.local_api import is_embedded

    context = FlowRunContext.get()
    if context is None or context.flow_run is None or is_embedded(PREFECT_API_URL.value()):
        return order
    flow_run, request = context.flow_run, order.request
    deployed = flow_run.deployment_id is not None
    view = PrefectView(
        inner=order.progress,
        api=PrefectApi(flow_run.id, request.run_id, set(flow_run.tags), flow_run.run_count),
        board=RunBoard(request.run_id, request.training.max_steps),
        log=get_run_logger(),
        ask_to_stop=lambda reason: DRIVEN.run(request.run_id).ask_to_stop(reason),
        # A runner or worker sends a signal; without one, only the flow run's state tells of a cancel.
        pace=Pace(poll_s=10.0 if deployed else 2.0),
    )
    return replace(order, progress=view.start(), options=replace(order.options, person_at_hand=True))


def follow_run(run: DrivenRun) -> None:
    """Once the run folder is held: its journal is shown, and a run that crashes again and again is ended."""
    from flows.prefect_view.publisher import PrefectView

    if not isinstance(run.stage, Held):
        return
    remember_store(run.order.settings.mem_home, run.stage.state.folder.parent)
    if isinstance(run.order.progress, PrefectView):
        run.order.progress.follow(run.stage.state)
    refuse_crash_loop(run.stage.state, run.order.request.resilience.max_failures_without_progress)


def ask_through_prefect(run: DrivenRun) -> None:
    """Let a person approve changes, where the request asks for it and somebody can look at the flow run."""
    from flows.prefect_view.publisher import PrefectView

    if run.order.request.policy.approval.required and isinstance(run.order.progress, PrefectView):
        from flows.server.approval import approver

        run.session.advice.ask_person = approver(run)


def refuse_crash_loop(state: StateManager, limit: int) -> None:
    """End a flow run that is restarted again and again by an automation while its attempts die without a word.

    Raises:
        NoProgress: more than `limit` attempts in a row were killed and no new checkpoint was validated. Failed is not restarted.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.run_count <= 1:
        return
    kills = fold_state(state.lines()).kills_without_progress
    if kills > limit:
        raise NoProgress(
            f"{kills} attempts in a row were killed before a new checkpoint was validated",
            field="resilience.max_failures_without_progress",
            value=kills,
            bound=f"at most {limit}",
            remedy="Find out who kills them (dmesg, the worker's log), then submit the same run id anew.",
        )


def with_key_from_block(request: RuntimeRequest, settings: Settings) -> tuple[RuntimeRequest, Settings]:
    """`policy.planner.api_key_env: block:NAME` takes the key from Prefect's Secret block NAME; it never enters the request.

    Raises:
        RequestError: there is no such block.
    """
    name = request.policy.planner.api_key_env or ""
    if not name.startswith("block:"):
        return request, settings
    from prefect.blocks.system import Secret

    try:
        key = Secret.load(name.removeprefix("block:"), _sync=True).get()  # type: ignore[call-arg]
    except ValueError as exc:
        raise RequestError(
            "there is no such Secret block", field="policy.planner.api_key_env", value=name, remedy="Create it in the UI under Blocks."
        ) from exc
    planner = request.policy.planner.model_copy(update={"api_key_env": KEY_VARIABLE})
    policy = request.policy.model_copy(update={"planner": planner})
    return request.model_copy(update={"policy": policy}), replace(settings, environ={**settings.environ, KEY_VARIABLE: str(key)})


def forget_results() -> None:
    """Let go of what finished tasks returned: Prefect keeps every result of a flow until its end, to draw arrows between tasks."""
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
