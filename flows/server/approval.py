"""A person's approval of changed hyper-parameters: the flow run pauses in Prefect's UI with a form until somebody answers."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from pydantic import Field

from flows.prefect_view.markdown import table
from mem_core.domain.policy import Approval, PolicyDecision
from tasks.running import DrivenRun

POLL_S = 2
MARGIN_S = 600  # Prefect's own limit would end the run as Failed; ours answers first


class ApplyProposal(RunInput):
    """The form."""

    apply: bool = Field(default=False, description="Apply the proposed values from the next segment on.")
    by: str = Field(default="", description="Who decides; kept in Prefect.")


TIMED_OUT = "nobody within the time limit"


def approver(run: DrivenRun) -> Callable[[PolicyDecision], Approval]:
    """Asks through Prefect. No answer within `policy.approval.time_limit_s` is a refusal, and training goes on without the change."""
    limit_s = run.order.request.policy.approval.time_limit_s

    def ask(decision: PolicyDecision) -> Approval:
        run.order.progress.note(f"waiting for a person's approval, {limit_s:.0f} s at most: answer with Resume in the UI")
        form = ApplyProposal.with_initial_data(description=_words(decision, limit_s), apply=False)
        with _answer_after(limit_s), run.asking_a_person():
            answer = pause_flow_run(form, timeout=int(limit_s + MARGIN_S), poll_interval=POLL_S, key=f"mem-{uuid.uuid4().hex[:8]}")
        if answer.by == TIMED_OUT:
            return "timed_out"
        return "granted" if answer.apply else "refused"

    return ask


def _words(decision: PolicyDecision, limit_s: float) -> str:
    proposed = decision.proposed_hyperparams.model_dump() if decision.proposed_hyperparams is not None else {}
    now = decision.applied_hyperparams.model_dump()
    rows = [(name, f"{now[name]}", f"{value}") for name, value in proposed.items() if value != now.get(name)]
    return f"{decision.detail}\n\n{table(('value', 'now', 'proposed'), rows)}\n\nNo answer within {limit_s:.0f} s is a refusal."


@contextmanager
def _answer_after(limit_s: float) -> Iterator[None]:
    """Give the refusal ourselves when the time is up: a pause that Prefect times out would fail the run."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    timer = threading.Timer(limit_s, _refuse, (context.flow_run.id,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _refuse(flow_run_id: UUID) -> None:
    with get_client(sync_client=True) as client:
        client.resume_flow_run(flow_run_id, run_input={"apply": False, "by": TIMED_OUT})
