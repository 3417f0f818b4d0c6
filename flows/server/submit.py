"""Start a deployment from Python and hold on to it: `run = submit(request); run.status(); run.result(); run.cancel()`."""

import sys
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling

from flows.flow_request import refuse_large, refuse_relative_store, settled_request
from flows.notebook import ShownResult
from flows.prefect_view.summary import result_in
from flows.server.waiting import QUEUED, waits_for
from mem_core.domain import errors
from mem_core.domain.errors import EnvironmentUnfit, InternalError, Interrupted, MemError, RequestError
from mem_core.domain.printable import printable
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.request.file import parse_request

POLL_S = 1.0
REASON_CHARACTERS = 500


class RunHandle:
    """A flow run of a deployment, wherever it runs."""

    def __init__(self, flow_run_id: UUID, start_within_s: float) -> None:
        self.flow_run_id = flow_run_id
        self._start_within_s = start_within_s
        self._said = ""

    @property
    def url(self) -> str:
        """Its page in the UI."""
        return f"{(PREFECT_API_URL.value() or '').removesuffix('/api')}/runs/flow-run/{self.flow_run_id}"

    def status(self) -> str:
        """The state in one line, with the newest progress, or what a queued run waits for, where there is any.

        Raises:
            EnvironmentUnfit: no process has picked it up in time.
        """
        with get_client(sync_client=True) as client:
            run = self._read(client)
            waits = self._waits(client, run)
            lines = [artifact.description for artifact in self._artifacts(client) if artifact.type == "progress" and artifact.description]
        state = run.state_name or "Unknown"
        told = waits or (lines[-1] if lines else "")
        return f"{state}: {told}" if told else state

    def result(self, timeout_s: float | None = None) -> ShownResult:
        """Wait for the end and return the result. What a queued run waits for is said once on standard error.

        Raises:
            MemError: the run was refused, stopped or has failed; its kind tells which. EnvironmentUnfit: nobody picked it up in
            time. TimeoutError: it has not ended within `timeout_s`.
        """
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with get_client(sync_client=True) as client:
                run = self._read(client)
                waits = self._waits(client, run)
                if run.state is not None and run.state.is_final():
                    return self._ended(client, run)
            self._say(run, waits)
            if time.monotonic() > end_s:
                why = f" ({waits})" if waits else ""
                raise TimeoutError(f"flow run {run.name} is {run.state_name} after {timeout_s} s{why}: {self.url}")
            time.sleep(POLL_S)

    def cancel(self) -> None:
        """Ask it to commit and stop; `result` then raises Interrupted. The same run id again goes on."""
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(self.flow_run_id, Cancelling())

    def _read(self, client: SyncPrefectClient) -> FlowRun:
        try:
            return client.read_flow_run(self.flow_run_id)
        except ObjectNotFound as exc:
            raise RequestError("this flow run was deleted", value=self.flow_run_id, remedy="Submit it again: it resumes.") from exc

    def _waits(self, client: SyncPrefectClient, run: FlowRun) -> str:
        """What a run that has not started waits for, in words; empty where there is nothing to say (yet).

        Raises:
            EnvironmentUnfit: nobody is there who would pick it up.
        """
        state, since = run.state, run.created or run.expected_start_time
        if state is None or since is None or run.start_time is not None or not (state.is_scheduled() or state.is_pending()):
            return ""
        if state.name != QUEUED and time.time() - since.timestamp() < self._start_within_s:
            return ""
        behind = waits_for(client, run) if state.is_scheduled() else "is picked up and has not started yet"
        if behind:
            return behind
        raise EnvironmentUnfit(
            f"no worker picked it up within {self._start_within_s:.0f} s",
            value=f"flow run {run.name} is {run.state_name}",
            remedy="Start one with: mem serve (or: prefect worker start --pool mem-process); the flow run then starts by itself.",
        )

    def _say(self, run: FlowRun, waits: str) -> None:
        if waits and waits != self._said:
            print(printable(f"mem: flow run {run.name} {waits}"), file=sys.stderr)
            self._said = waits

    def _artifacts(self, client: SyncPrefectClient) -> list[Any]:
        return client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[self.flow_run_id])))

    def _ended(self, client: SyncPrefectClient, run: FlowRun) -> ShownResult:
        if run.state is not None and run.state.is_completed():
            for artifact in self._artifacts(client):
                found = result_in(str(artifact.data))
                if found is not None:
                    return ShownResult.model_validate(seen_from(PREFECT_API_URL.value() or "", found))
            raise InternalError(
                "the run is completed and its result did not reach Prefect", value=run.name, remedy="Read result.json in the run folder."
            )
        raise _error_of(run)


def seen_from(api_url: str, result: dict[str, Any]) -> dict[str, Any]:
    """A result whose `report_url` leads to the server by the name that is asked here: the run may know it by another. Pure."""
    url, here = urlsplit(str(result.get("report_url", ""))), urlsplit(api_url)
    if not (url.scheme.startswith("http") and here.netloc):
        return result
    return {**result, "report_url": url._replace(scheme=here.scheme, netloc=here.netloc).geturl()}


def _error_of(run: FlowRun) -> MemError:
    """The error behind a final state, of the kind that its message names."""
    state = run.state
    message = (state.message if state is not None else None) or "no message"
    if state is not None and state.is_cancelled():
        return Interrupted(message.rstrip("."), remedy="Submit it again with the same run id: it goes on.")
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, MemError) and kind is not MemError and f"{name}: " in message:
            return kind(message.split(f"{name}: ", 1)[1].rstrip("."), remedy="See the flow run's page for more.")
    return InternalError(f"flow run {run.name} is {run.state_name}: {message}", remedy="Submit it again: it resumes.")


def submit(
    request: RuntimeRequest | Mapping[str, Any] | None = None,
    *,
    deployment: str = "endurance/endurance",
    overrides: Mapping[str, Any] | None = None,
    start_within_s: float = 60.0,
    **parameters: Any,
) -> RunHandle:
    """Start a deployment; returns at once. Works with and without a running event loop.

    `request` replaces the deployment's own as a whole; `overrides` change single values. Other parameters go to the deployment
    as they are (`submit(deployment="finetune/finetune", run_id="a", model="models/base", data=["notes.txt"])`).

    Raises:
        RequestError: the request is wrong or larger than a request is (nothing is submitted), or there is no such deployment.
        EnvironmentUnfit: no Prefect server is configured, or it is away.
    """
    refuse_large({"request": request, "overrides": overrides, **parameters})
    if not PREFECT_API_URL.value():
        raise EnvironmentUnfit("no Prefect server is configured", remedy="Set PREFECT_API_URL to the server's /api, or start: mem serve")
    if request is not None:
        checked = request if isinstance(request, RuntimeRequest) else parse_request(request)
        refuse_relative_store(settled_request(checked, overrides, deployed=False, start_unix_s=time.time()).store)
        parameters["request"] = checked.model_dump(mode="json")
    if overrides is not None:
        parameters["overrides"] = dict(overrides)
    try:
        return RunHandle(_created(deployment, parameters), start_within_s)
    except httpx.TransportError as exc:
        raise EnvironmentUnfit(
            f"the Prefect server is away ({type(exc).__name__})", value=PREFECT_API_URL.value(), remedy="Start it, for one with: mem serve"
        ) from exc


def _created(deployment: str, parameters: dict[str, Any]) -> UUID:
    """Id of a new flow run. Raises RequestError."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(found.id, parameters=parameters).id
        except ObjectNotFound as exc:
            raise RequestError(
                "there is no such deployment", field="deployment", value=deployment, remedy="Create the deployments with: mem serve"
            ) from exc
        except PrefectHTTPStatusError as exc:
            if exc.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                raise
            raise RequestError(
                f"the deployment does not take this: {_reason(exc)}", field="deployment", value=deployment, remedy="Nothing was submitted."
            ) from exc


def _reason(exc: PrefectHTTPStatusError) -> str:
    """The server's words and never the parameters that it repeats."""
    try:
        detail = exc.response.json().get("detail")
    except ValueError:
        detail = None
    return (detail if isinstance(detail, str) else f"HTTP {exc.response.status_code}")[:REASON_CHARACTERS]
