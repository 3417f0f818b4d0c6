"""The main job: doctor → prepare → policy → (train-segment → validate-checkpoint) × N → report."""

from typing import Any

from prefect.futures import PrefectFuture
from prefect.states import Cancelled

from flows.context import (
    ask_through_prefect,
    flow_run_name,
    forget_results,
    refuse_crash_loop,
    request_of_run,
    show_in_prefect,
    with_key_from_block,
)  # fmt: skip
from flows.mem_flow import mem_flow
from flows.prefect_view.publisher import PrefectView
from flows.shown_progress import shown_progress
from mem_core.bootstrap import RunDraft, draft_run
from mem_core.domain.errors import Interrupted
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.domain.segment import SegmentInterrupted
from mem_core.infrastructure.settings import Settings
from tasks.doctor import examine_environment
from tasks.policy import decide_hyperparams
from tasks.prepare_data import prepare_run
from tasks.report import write_report
from tasks.running import driving, session_of, stopping_by_signal
from tasks.train_segment import train_segment
from tasks.validate_checkpoint import validate_checkpoint


@mem_flow(name="endurance", flow_run_name=flow_run_name, persist_result=False, validate_parameters=True)
def endurance(
    request: RuntimeRequest,
    overrides: dict[str, Any] = {},  # noqa: B006 - never changed; the form shows it
    allow_reshard: bool = False,
) -> Any:
    """Train until `training.max_steps`, surviving what may come; the same run_id again resumes.

    Args:
        request: Everything about the run. A request that is given replaces the deployment's own as a whole.
        overrides: Single values by dotted name, such as {"training.max_steps": 200}; they win over the request.
        allow_reshard: Convert the newest checkpoint where the request asks for other ranks or another ZeRO stage.
    """
    return drive_request(request_of_run(request, overrides), allow_reshard)


def drive_request(request: RuntimeRequest, allow_reshard: bool = False) -> Any:
    """Inside a flow: one attempt of a run. A RunResult, or the Cancelled state of a run that was asked to stop.

    Raises:
        MemError: every other ending.
    """
    request, settings = with_key_from_block(request, Settings.from_environment())
    draft = draft_run(request, shown_progress(), settings, allow_reshard=allow_reshard)
    show_in_prefect(draft)
    try:
        return run_to_end(draft)
    except Interrupted as exc:
        return Cancelled(message=str(exc))


def run_to_end(draft: RunDraft) -> RunResult:
    """Drive one attempt to its end; whatever happens, workers end and the ending is journaled."""
    error: BaseException | None = None
    with driving(draft) as key, stopping_by_signal(draft):
        try:
            examine_environment(key)
            _follow(draft)
            prepare_run(key)
            ask_through_prefect(draft)
            train_to_end(key)
        except BaseException as exc:
            error = exc
            raise
        finally:
            draft.close(error)
        result = write_report(key)
    return RunResult.model_validate(result)


def _follow(draft: RunDraft) -> None:
    if draft.state is None:
        return
    if isinstance(draft.progress, PrefectView):
        draft.progress.follow(draft.state)
    refuse_crash_loop(draft.state, draft.request.resilience.max_failures_without_progress)


def train_to_end(key: str) -> None:
    """The loop of segments. At most one checkpoint is being validated while the next segment trains."""
    session = session_of(key)
    pending: PrefectFuture[Any] | None = None
    while True:
        segment = session.next_segment()
        if segment is None:
            pending = _settle(key, pending)
            if session.next_segment() is None:
                break
            continue
        decide_hyperparams(key, segment)
        outcome = train_segment(key, segment.segment_index, segment.from_step, segment.until_step)
        _settle(key, pending)
        forget_results()
        pending = validate_checkpoint.submit(key, outcome["to_step"])
        if outcome["kind"] == "interrupted":
            _settle(key, pending)
            raise session.interrupted(SegmentInterrupted.model_validate(outcome))
    session.finish()


def _settle(key: str, pending: "PrefectFuture[Any] | None") -> None:
    """Wait for the verdict in flight and take it into account; a bad one changes where the next segment starts."""
    if pending is None:
        return
    session = session_of(key)
    with session.segments.ledger.bucket("validation_wait"):
        result = pending.result()
    session.settle(result)
