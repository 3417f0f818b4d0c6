"""A run that has already done what is asked: answered from its journal, without a server, a fork server or the doctor."""

import os
from pathlib import Path

from flows.commands.report import run_status
from mem_core.core.results.evaluations import EvaluationBook
from mem_core.core.results.length import going_on_in_steps
from mem_core.core.run.reconcile import reconcile
from mem_core.core.run.record import read_record
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.machine.store import is_remote
from mem_core.infrastructure.telemetry.loggers.marks import read_mark
from mem_core.infrastructure.telemetry.loggers.mlflow import MARK_NAME
from mem_core.runtime.session.results.export_service import is_wanted, standing_export


def complete_words(run_id: str) -> str:
    """What is said of such a run."""
    return f"run {run_id} is complete; nothing is to be done. More steps or epochs go on with it."


def result_if_finished(
    folder: Path, request: RuntimeRequest, allow_reshard: bool = False, as_born: tuple[str, ...] = ()
) -> RunResult | None:
    """The result of a run that has already done what is asked, from its journal; None where something is left to do.

    `as_born`: see `OpeningOptions`.

    Raises:
        RequestError: the run was born with other values. NoValidCheckpoint: its record is damaged.
    """
    record = read_record(folder)
    if record is None or not os.path.isdir(folder / "journal"):
        return None
    request = going_on_in_steps(record.length, record.request, request, as_born)
    reconcile(record.request, request, allow_reshard=allow_reshard, as_born=as_born)
    result = run_status(folder)
    if result.status != "completed" or not (result.applied_steps >= request.training.max_steps or _stays_stopped(folder, request)):
        return None
    if is_wanted(request) and standing_export(folder, result.applied_steps, result.weights_digest) is None:
        return None  # every step is done, and the model folder that the run ends with is not there
    if result.mirror is not None and result.mirror.behind and (is_remote(request.store) or request.checkpoint.mirror is not None):
        return None  # every step is done, and its copy is not where it was asked to be
    if _lacks_figures(folder, request, result.applied_steps):
        return None  # every step is done, and a server has not been told of all of them
    return result.model_copy(update={"device": record.device, "run_folder": str(folder.absolute())})


def _lacks_figures(folder: Path, request: RuntimeRequest, applied_steps: int) -> bool:
    """Whether MLflow is asked for and does not have the last step yet."""
    mark = read_mark(folder / "metrics" / MARK_NAME)
    return "mlflow" in request.telemetry.loggers and (mark is None or mark.steps_until < applied_steps)


def _stays_stopped(folder: Path, request: RuntimeRequest) -> bool:
    """Whether a run that stopped early would stop there under this request's patience too."""
    book = EvaluationBook(read_journal(folder / "journal"))
    stopped = book.stopped_early
    return stopped is not None and book.stop_due(stopped.step, request.evaluation.patience) is not None
