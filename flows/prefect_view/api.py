"""The few calls to Prefect's API that the view makes, each with a time limit and without Prefect's own minutes of retries."""

from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Crashed

from flows.prefect_view.news import MemEvent
from flows.prefect_view.served import page_path

CALL_LIMIT_S = 5.0


class ViewApi(Protocol):
    """What the publishing thread needs. Every call may raise; none may take long."""

    def put_artifact(self, key: str, kind: str, data: Any, description: str) -> None:
        """Create it the first time, update it in place from then on."""
        ...

    def emit(self, event: MemEvent) -> None:
        """Send a custom event."""
        ...

    def introduce(self) -> None:
        """Tag the flow run, and end what a killed attempt of it left "Running" in Prefect."""
        ...

    def stop_wanted(self) -> str:
        """Why the run is to stop ("" when it is not): a cancel, or a deleted flow run."""
        ...

    def served_page(self, run_folder: Path) -> str:
        """The URL under which the server itself serves the report of that run; "" where it does not."""
        ...

    def __enter__(self) -> "ViewApi": ...

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None: ...


class PrefectApi:
    """The real one. Enter it in the thread that uses it, since Prefect's settings are bound to a thread's context."""

    def __init__(self, flow_run_id: UUID, run_id: str, tags: set[str], run_count: int = 1) -> None:
        self._flow_run_id = flow_run_id
        self._related = {"prefect.resource.id": f"prefect.flow-run.{flow_run_id}", "prefect.resource.role": "flow-run"}
        self._run_id = run_id
        self._tags = tags
        self._run_count = run_count
        self._ids: dict[str, UUID] = {}
        self._client: SyncPrefectClient | None = None
        self._settings: Any = None

    def __enter__(self) -> "PrefectApi":
        self._settings = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})
        self._settings.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if self._client is not None:
            self._client.__exit__(None, None, None)
        self._settings.__exit__(kind, exc, trace)

    def _api(self) -> SyncPrefectClient:
        if self._client is None:
            self._client = get_client(sync_client=True, httpx_settings={"timeout": CALL_LIMIT_S}).__enter__()
        return self._client

    def put_artifact(self, key: str, kind: str, data: Any, description: str) -> None:
        """One row per key and flow run: a new row each time would add a version per update."""
        if key in self._ids:
            # Not client.update_artifact: that sends an event with each update, which would be most of the database after a few days.
            body = {"data": data, "description": description}
            self._api().request("PATCH", "/artifacts/{id}", json=body, path_params={"id": self._ids[key]})
            return
        found = self._api().read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]), flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]))
        )
        if found:  # a retry of the flow run goes on with its page
            self._ids[key] = found[0].id
            self.put_artifact(key, kind, data, description)
            return
        artifact = ArtifactCreate(key=key, type=kind, data=data, description=description, flow_run_id=self._flow_run_id)
        self._ids[key] = self._api().create_artifact(artifact).id

    def emit(self, event: MemEvent) -> None:
        """Queued by Prefect's own events thread; never blocks."""
        emit_event(
            event.name,
            resource={"prefect.resource.id": f"mem.run.{self._run_id}", "prefect.resource.name": self._run_id},
            related=[self._related],
            payload={"run_id": self._run_id, **event.payload},
        )

    def introduce(self) -> None:
        """Adds to the tags that the deployment gave, so that the UI's lists can be filtered by run."""
        self._api().update_flow_run(self._flow_run_id, tags=sorted(self._tags | {"mem", f"run:{self._run_id}"}))
        if self._run_count > 1:
            self._end_task_runs_of_killed_attempts()

    def _end_task_runs_of_killed_attempts(self) -> None:
        running = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.RUNNING])))
        own = FlowRunFilter(id=FlowRunFilterId(any_=[self._flow_run_id]))
        for task_run in self._api().read_task_runs(task_run_filter=running, flow_run_filter=own):
            if task_run.flow_run_run_count < self._run_count:
                self._api().set_task_run_state(task_run.id, Crashed(message="its attempt was killed"), force=True)

    def stop_wanted(self) -> str:
        """Asked of the server, since a run without a runner gets no signal."""
        try:
            state = self._api().read_flow_run(self._flow_run_id).state
        except ObjectNotFound:
            return "the deletion of its flow run"
        cancelled = state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)
        return "a cancel in Prefect" if cancelled else ""

    def served_page(self, run_folder: Path) -> str:
        """Asked of the server: only MEM's own serves reports, and only those of runs on its own machine."""
        url = str(self._api().api_url).removesuffix("/").removesuffix("/api") + page_path(run_folder)
        return url if httpx.head(url, timeout=CALL_LIMIT_S, trust_env=False).status_code == httpx.codes.OK else ""
