"""The main job: doctor → prepare → policy → (train-segment → validate-checkpoint) × N → report."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from prefect.states import Cancelled
from pydantic import Field, TypeAdapter

from flows.commands.inspection.finished import result_if_finished
from flows.context import (
    ask_through_prefect,
    flow_run_name,
    follow_run,
    forget_results,
    request_of_run,
    shown_in_prefect,
    with_key_from_block,
)
from flows.flow_request import FirstFields, RunId
from flows.mem_flow import mem_flow
from mem_core.bootstrap import live_root
from mem_core.core.recovery.actions import Train
from mem_core.domain.errors import Interrupted
from mem_core.domain.request import PositiveInt, RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import NoProgress
from mem_core.runtime.session.opening.stages import RunOrder
from mem_core.runtime.session.run_loop import Pending, run_loop
from tasks.doctor import examine_environment
from tasks.policy import decide_hyperparams
from tasks.prepare_data import prepare_run
from tasks.report import write_report
from tasks.running import DRIVEN, session_of
from tasks.train_segment import train_segment
from tasks.validate_checkpoint import validate_checkpoint

OUTCOME: TypeAdapter[SegmentCompleted | SegmentInterrupted] = TypeAdapter(SegmentCompleted | SegmentInterrupted)


def finished_endurance(parameters: Mapping[str, Any]) -> RunResult | None:
    """The result of a run that has already done what the parameters of `endurance` ask. Raises MemError: it cannot go on with them."""
    overrides = {**FirstFields.among(parameters).overrides(), **parameters["overrides"]}
    return finished_run(request_of_run(parameters["request"], overrides), parameters["allow_reshard"])


@mem_flow(name="endurance", flow_run_name=flow_run_name, persist_result=False, validate_parameters=True, answer=finished_endurance)
def endurance(
    request: RuntimeRequest,
    overrides: dict[str, Any] = {},  # noqa: B006 - never changed; the form shows it
    allow_reshard: bool = False,
    *,
    run_id: RunId | None = None,
    model: Annotated[str, Field(min_length=1)] | None = None,
    data: str | list[str] | None = None,
    max_steps: PositiveInt | None = None,
    global_batch_size: Annotated[int, Field(ge=1, le=1_048_576)] | None = None,
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None,
) -> Any:
    """Train until `training.max_steps`, surviving what may come; the same run_id again resumes.

    Args:
        request: Everything about the run. A request that is given replaces the deployment's own as a whole.
        overrides: Single values by dotted name, such as {"training.max_steps": 200}; they win over the request and the first fields.
        allow_reshard: Convert the newest checkpoint where the request asks for other ranks or another ZeRO stage.
        run_id: Name of the run; the same name again resumes it. Like the other first fields it wins over the request, where it is set.
        model: Folder or URL of a Hugging Face causal language model, or preset:NAME.
        data: Files, folders, globs or URLs of text or rows (JSONL, JSON, CSV, parquet, ...); stdlib: is Python's own library.
        max_steps: Optimizer updates to reach.
        global_batch_size: Sequences per update, over all ranks.
        learning_rate: Peak learning rate.
    """
    first = FirstFields(run_id, model, data, max_steps, global_batch_size, learning_rate)
    return drive_request(request_of_run(request, {**first.overrides(), **overrides}), allow_reshard)


def drive_request(request: RuntimeRequest, allow_reshard: bool = False, as_born: tuple[str, ...] = ()) -> Any:
    """Inside a flow: one attempt of a run. A RunResult, or the Cancelled state of a run that was asked to stop.

    `allow_reshard` and `as_born`: see `OpeningOptions`.

    Raises:
        MemError: every other ending.
    """
    given = DRIVEN.surroundings
    request, settings = with_key_from_block(given.request or request, Settings.from_environment())
    options = replace(given.options, allow_reshard=allow_reshard, as_born=as_born)
    order = RunOrder(request, settings, given.progress or NoProgress(), options=options)
    try:
        return run_to_end(shown_in_prefect(order))
    except Interrupted as exc:
        return Cancelled(message=str(exc))


def finished_run(request: RuntimeRequest, allow_reshard: bool = False, as_born: tuple[str, ...] = ()) -> RunResult | None:
    """Its result from the journal, where nothing is left to do. Raises MemError: the run was born with other values."""
    folder = live_root(request, Settings.from_environment()) / request.run_id
    return result_if_finished(folder, request, allow_reshard, as_born)


def run_to_end(order: RunOrder) -> RunResult:
    """Drive one attempt to its end; whatever happens, workers end and the ending is journaled."""
    with DRIVEN.driving(order) as run:
        with run.closing():
            examine_environment(run.key)
            follow_run(run)
            prepare_run(run.key)
            ask_through_prefect(run)
            train_to_end(run.key)
        result = write_report(run.key)
    return RunResult.model_validate(result)


def train_to_end(key: str) -> None:
    """The loop of segments, each of its steps a Prefect task. At most one checkpoint is being validated while the next segment trains."""

    def train(segment: Train) -> SegmentCompleted | SegmentInterrupted:
        decide_hyperparams(key, segment)
        return OUTCOME.validate_python(train_segment(key, segment.segment_index, segment.from_step, segment.until_step))

    def submit(step: int) -> Pending:
        forget_results()
        return validate_checkpoint.submit(key, step)

    run_loop(session_of(key), train, submit)
