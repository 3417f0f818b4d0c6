"""Whether a crashed flow run is scheduled again: counted from its own history in Prefect, outside of the process that crashes.

A run that gets as far as its journal counts its attempts itself (`flows.context.refuse_crash_loop`). One whose process dies before
that, for lack of a folder, a package or a machine, is counted by nobody else and would be started for ever.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.states import Failed, Scheduled

from flows.flow_request import run_id_in
from mem_core.domain.errors import NoProgress

MAX_RESTARTS = 3
RESTARTED = "restarted after a crash"
PROGRESS_EVENT = "mem.checkpoint.validated"
BY_PEOPLE = ("Scheduled", "AwaitingRetry")  # a retry from the command line and one from the UI; Late and its kin are Prefect's own
ENDED = (StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED)


@dataclass(frozen=True)
class Restart:
    """Schedule it again, for the `number`th time since it last got on."""

    number: int


@dataclass(frozen=True)
class GiveUp:
    """It crashed once more after `MAX_RESTARTS` restarts without progress. `last` is what was said of the last crash."""

    last: str


@dataclass(frozen=True)
class LeaveAlone:
    """It is not crashed any more: somebody was quicker."""

    state: str


Verdict = Restart | GiveUp | LeaveAlone


def judge(history: Sequence[State[Any]], progress: datetime | None) -> Verdict:
    """Pure. `history`: every state of the flow run, oldest first; `progress`: when it last validated a checkpoint.

    Restarts are counted back to the last progress, the last time that a person started it, or its last proper end.
    """
    if not history or history[-1].type != StateType.CRASHED:
        return LeaveAlone(history[-1].name or "unknown" if history else "unknown")
    restarts = 0
    for state in reversed(history):
        if _is_restart(state):
            if progress is not None and state.timestamp < progress:
                break
            restarts += 1
        elif state.type in ENDED or (state.type == StateType.SCHEDULED and state.name in BY_PEOPLE):
            break
    return Restart(restarts + 1) if restarts < MAX_RESTARTS else GiveUp(history[-1].message or "no message")


def _is_restart(state: State[Any]) -> bool:
    return state.type == StateType.SCHEDULED and (state.message or "").startswith(RESTARTED)


def restart_or_give_up(flow_run_id: UUID) -> str:
    """Do what `judge` says; returns what was done, in words."""
    with get_client(sync_client=True) as client:
        try:
            run = client.read_flow_run(flow_run_id)
        except ObjectNotFound:
            return f"flow run {flow_run_id} was deleted: nothing is to be done"
        history = sorted(client.read_flow_run_states(flow_run_id), key=lambda state: state.timestamp)
        verdict = judge(history, _last_progress(client, flow_run_id))
        match verdict:
            case LeaveAlone(state=state):
                return f"flow run {run.name} is {state}: nothing is to be done"
            case Restart(number=number):
                words = f"{RESTARTED} ({number} of {MAX_RESTARTS} without progress)"
                client.set_flow_run_state(flow_run_id, Scheduled(name="AwaitingRetry", message=words), force=True)
                return f"flow run {run.name} {words}"
            case GiveUp(last=last):
                words = _given_up(last, flow_run_id)
                client.set_flow_run_state(flow_run_id, Failed(message=words), force=True)
                _tell(run_id_in(run.name), flow_run_id, words)
                return f"flow run {run.name}: {words}"


def _given_up(last: str, flow_run_id: UUID) -> str:
    error = NoProgress(
        f"crashed again after {MAX_RESTARTS} restarts without a new checkpoint and is not restarted any more; "
        f"last crash: {last[:500].rstrip('.')}",
        remedy=f"Mend the cause, then: prefect flow-run retry {flow_run_id}",
    )
    return f"{type(error).__name__}: {error}"


def _last_progress(client: SyncPrefectClient, flow_run_id: UUID) -> datetime | None:
    """From the events that a run sends of each proven checkpoint; a server that keeps no events knows of none."""
    wanted = {
        "event": {"name": [PROGRESS_EVENT]},
        "related": {"id": [f"prefect.flow-run.{flow_run_id}"]},
        "order": "DESC",
    }
    answer = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 1})
    return _newest(event["occurred"] for event in answer.json()["events"])


def _newest(times: Iterable[str]) -> datetime | None:
    return max((datetime.fromisoformat(time) for time in times), default=None)


def _tell(name: str, flow_run_id: UUID, words: str) -> None:
    """As a run that ends by itself is told, for the automation that notifies people."""
    emit_event(
        "mem.run.finished",
        resource={"prefect.resource.id": f"mem.run.{name}", "prefect.resource.name": name},
        related=[{"prefect.resource.id": f"prefect.flow-run.{flow_run_id}", "prefect.resource.role": "flow-run"}],
        payload={"run_id": name, "status": "failed", "exit_code": NoProgress.exit_code, "message": words[:500]},
    )
