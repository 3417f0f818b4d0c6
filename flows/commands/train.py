"""`mem train`: the flow, run by this process, with an embedded Prefect server unless PREFECT_API_URL names one."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

from flows.commands.inspection.finished import complete_words, result_if_finished
from flows.commands.output import print_result
from flows.commands.report import run_status
from flows.server.embedded import EmbeddedServer
from flows.server.local_api import note_embedded
from mem_core.bootstrap import examine_only, live_root, start_fork_server
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import InternalError, Interrupted, MemError
from mem_core.domain.events import AttemptStarted
from mem_core.domain.request import RuntimeRequest, shown_request
from mem_core.domain.run import RunResult
from mem_core.infrastructure.request.file import load_request
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import ProgressDisplay
from mem_core.runtime.session.opening.stages import OpeningOptions
from tasks.running import DRIVEN, Surroundings


def train(path: str, overrides: list[str], as_json: bool, allow_reshard: bool = False, on_built: str = "") -> int:
    """Run a request to its end; returns the exit code and prints the result either way, an error as the last line.

    The doctor looks once before anything is started, so that a wrong request is answered within a second; the flow's own
    doctor task looks again, since minutes may lie between in a deployment. `on_built`: see `OpeningOptions`.
    """
    request = load_request(path, overrides)
    settings = Settings.from_environment()
    finished = result_if_finished(live_root(request, settings) / request.run_id, request, allow_reshard)
    if finished is not None:
        print(f"mem: {complete_words(request.run_id)}", file=sys.stderr)
        print_result(finished, as_json)
        return 0
    report = examine_only(request, settings, allow_reshard=allow_reshard)
    error = error_of(report)
    if error is not None:
        raise error
    progress = ProgressDisplay()
    progress.note("loading torch, DeepSpeed and Prefect (some 10 s; longer the first time)")
    fork_server = start_fork_server(request, settings, report)
    server = None
    try:
        if not settings.prefect_api_url:
            server = EmbeddedServer.start(settings, f"{live_root(request, settings)}/{request.run_id}", note=progress.note)
            note_embedded(server)
            _configure_client(server.url)
            server.wait_ready()
            server.keep_alive()
        with DRIVEN.surrounded(Surroundings(progress, OpeningOptions(on_built=on_built, server=fork_server), request)):
            result, error = _drive(request, progress, settings, allow_reshard)
    finally:
        progress.close()
        fork_server.close()
        if server is not None:
            server.close()
    print_result(result, as_json)
    return 0 if error is None else _say(error)


def _say(error: MemError) -> int:
    print(f"mem: {error}", file=sys.stderr)
    return error.exit_code


def _configure_client(url: str) -> None:
    """Point this process's Prefect client at the embedded server, before Prefect is imported."""
    os.environ.update(
        PREFECT_API_URL=url,
        PREFECT_LOGGING_LEVEL="ERROR",
        PREFECT_LOGGING_TO_API_ENABLED="false",
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE="false",
        PREFECT_CLIENT_METRICS_ENABLED="false",
        PREFECT_EVENTS_WORKER_MAX_QUEUE_SIZE="10000",
    )


def _drive(
    request: RuntimeRequest, progress: ProgressDisplay, settings: Settings, allow_reshard: bool
) -> tuple[RunResult, MemError | None]:
    # Prefect prints each error twice with its whole traceback; the one message for people is ours.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_COLORS", "false")  # our standard error shows escape sequences as text
    from prefect.exceptions import ExternalSignal

    from flows.endurance_flow import endurance

    warnings.filterwarnings("ignore", module="prefect")
    folder = live_root(request, settings) / request.run_id
    try:
        state: Any = endurance(shown_request(request), allow_reshard=allow_reshard, return_state=True)
        if state.is_completed():
            return RunResult.model_validate(state.result()), None
        if state.is_cancelled():
            return _result_of(folder, Interrupted(state.message or "stopped", remedy=""))
        state.result()
    except MemError as exc:
        return _result_of(folder, exc)
    except (KeyboardInterrupt, ExternalSignal) as exc:
        by = f" by {exc}" if str(exc) else ""
        remedy = "The same command goes on from the last validated checkpoint."
        return _result_of(folder, Interrupted(f"stopped at once{by}", remedy=remedy))
    except Exception as exc:  # noqa: BLE001 - the last edge: whatever it is becomes exit 70 with its text
        ended = ended_without_prefect(folder, exc)
        if ended is not None:
            progress.note(f"Prefect did not take the end of this flow run down ({type(exc).__name__}); the run itself ended as follows")
            return ended
        import traceback

        traceback.print_exc()
        return _result_of(folder, InternalError(f"{type(exc).__name__}: {exc}", remedy="Report this as a bug with the lines above."))
    raise InternalError("the flow ended in no known state", remedy="Report this as a bug.")


def ended_without_prefect(folder: Path, exc: Exception) -> tuple[RunResult, MemError | None] | None:
    """How this process's attempt ended by its journal, where all that failed was telling Prefect; None where it has no ending.

    An attempt that Prefect did not even let begin has none, whatever the one before it came to.
    """
    import httpx

    if not isinstance(exc, httpx.HTTPError | OSError) or not _drove(folder):
        return None
    result = run_status(folder)
    if result.status == "completed":
        return result, None
    if result.status == "running":
        return None
    kinds = {kind.exit_code: kind for kind in MemError.__subclasses__()}
    return result, kinds.get(result.exit_code, InternalError)(result.message, remedy="")


def _drove(folder: Path) -> bool:
    """Whether the newest attempt is this process's."""
    attempts = [line.event for line in read_journal(folder / "journal") if isinstance(line.event, AttemptStarted)]
    return bool(attempts) and attempts[-1].pid == os.getpid()


def _result_of(folder: Path, error: MemError) -> tuple[RunResult, MemError]:
    """The journal's result of a run that did not complete, with its error."""
    try:
        result = run_status(folder)
    except MemError:
        result = RunResult(status="failed", run_id=folder.name)
    status = "interrupted" if error.exit_code == Interrupted.exit_code else "failed"
    return result.model_copy(update={"status": status, "exit_code": error.exit_code, "message": str(error)}), error
