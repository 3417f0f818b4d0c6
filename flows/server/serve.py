"""`mem serve`: a local Prefect server with its UI, the deployments of deployments/prefect.yaml, and a process that runs them.

The runs are served by Prefect's runner and not by a worker: asked to stop (SIGTERM, Ctrl-C), the runner passes the wish on and
waits for the flows, which commit and end as Cancelled; a process worker kills its flows at once and leaves them "Running".
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flows.prefect_view.served import PREFIX
from flows.server.embedded import EmbeddedServer
from flows.server.gate import allowed_hosts
from flows.server.shipped import shipped
from mem_core.domain.errors import EnvironmentUnfit, RequestError
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_regular_text

if TYPE_CHECKING:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.deployments.runner import RunnerDeployment

DEPLOYMENTS_FILE = shipped("prefect.yaml")
AUTOMATIONS_FILE = shipped("automations.yaml")
OWN_PACKAGES = ("flows", "tasks", "mem_core")
SCHEDULE_FIELDS = ("cron", "day_or", "interval", "anchor_date", "rrule", "timezone")
HEARTBEAT_S = "30"  # the shortest that Prefect allows; the automation that finds dead flows counts on it


def serve(file: Path = DEPLOYMENTS_FILE, port: int = 4200, limit: int = 4, hosts: Sequence[str] = (), as_json: bool = False) -> int:
    """Serve until SIGTERM or Ctrl-C. With PREFECT_API_URL set, that server is used and none is started.

    `hosts`: names beside loopback's own under which a tunnel or an ingress leads here. `as_json`: one object on standard output once
    runs can be submitted, for a program that waits for that.

    Raises:
        RequestError: the file is missing or wrong. EnvironmentUnfit: the port is taken or the server does not start.
    """
    entries, allowed = read_deployments(file), allowed_hosts(hosts)
    settings = Settings.from_environment()
    _leave_folder_that_hides(settings.mem_home / "serve")
    server = None
    if settings.prefect_api_url is None:
        server = EmbeddedServer.start(settings, "serve", port=port, ui=True, allowed_hosts=allowed, note=_say)
    try:
        if server is not None:
            server.wait_ready()
            server.keep_alive()
            _say(f"all runs and their reports: {server.url.removesuffix('/api')}{PREFIX}")
        _serve(entries, settings.prefect_api_url or (server.url if server is not None else ""), limit, as_json)
    finally:
        if server is not None:
            server.close()
    return 0


def _serve(entries: list[dict[str, Any]], api_url: str, limit: int, as_json: bool) -> None:
    os.environ.update(PREFECT_API_URL=api_url, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE="false")
    os.environ["PYTHONSAFEPATH"] = "1"  # flow runs import MEM, not a folder named `flows` where this was started
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", HEARTBEAT_S)
    os.environ.setdefault("PREFECT_LOGGING_COLORS", "false")  # our standard error shows escape sequences as text
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import TerminationSignal
    from prefect.runner import Runner

    from flows.server.automations import apply_automations
    from flows.server.pauses import pause_while_away, paused_by_people

    runner = Runner(pause_on_shutdown=False, limit=limit)  # it would not tell its own pauses from those of people
    names = [name_of(entry) for entry in entries]
    with get_client(sync_client=True) as client:
        paused = paused_by_people(client, names)
    for entry in entries:
        runner.add_deployment(_as_people_left_it(entry, paused=name_of(entry) in paused))
    for line in apply_automations(AUTOMATIONS_FILE):
        if "left out" in line:
            _say(f"automation {line}")
    print(_greeting(entries, api_url.removesuffix("/api")), file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps(serving(entries, api_url)), flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt, TerminationSignal):
            asyncio.run(runner.start())
    except httpx.TransportError as exc:
        raise EnvironmentUnfit(
            f"the Prefect server at {api_url} is away ({type(exc).__name__})",
            remedy="Start it and then mem serve again; runs that were cut off go on from their newest validated checkpoint.",
        ) from exc
    finally:  # a runner that is asked to stop before it has begun leaves by SystemExit
        with contextlib.suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            pause_while_away(client, names)


def _as_people_left_it(entry: dict[str, Any], *, paused: bool) -> "RunnerDeployment":
    """The deployment of an entry with the schedules that its predecessor has on the server, `paused` where somebody paused that one."""
    from prefect.client.orchestration import get_client

    from flows.server.schedules import kept_schedules

    deployment = to_deployment(entry)
    with get_client(sync_client=True) as client:
        schedules, notes = kept_schedules(client, name_of(entry), to_schedules(entry))
    deployment.schedules = [*schedules]
    deployment.paused = paused
    if paused:
        notes = [*notes, f"{name_of(entry)} stays paused, as somebody paused it; resume it in the UI"]
    for note in notes:
        _say(note)
    return deployment


def _leave_folder_that_hides(elsewhere: Path) -> None:
    """Prefect imports a flow with the working folder first: a folder of somebody's own that is called `flows` would be taken for MEM's."""
    here = Path.cwd()
    if here == Path(__file__).parents[2]:
        return
    names = [name for name in OWN_PACKAGES if (here / name).exists() or (here / f"{name}.py").exists()]
    if names:
        elsewhere.mkdir(parents=True, exist_ok=True)
        os.chdir(elsewhere)
        _say(f"{here} has its own {', '.join(names)}, which would hide MEM's: runs work in {elsewhere}; give them absolute paths")


def serving(entries: list[dict[str, Any]], api_url: str) -> dict[str, Any]:
    """The same for programs: where the server is, which deployments it has."""
    return {"url": api_url.removesuffix("/api"), "api_url": api_url, "deployments": [name_of(entry) for entry in entries]}


def _greeting(entries: list[dict[str, Any]], url: str) -> str:
    names = "\n".join(f"  {name_of(entry):<28} {entry.get('description', '')}" for entry in entries)
    prefect = Path(sys.executable).with_name("prefect")
    return (
        f"serving at {url}\n{names}\n"
        "start one in the UI or from another shell:\n"
        f"  PREFECT_API_URL={url}/api {prefect} deployment run endurance/endurance -p 'overrides={{\"training.max_steps\": 300}}'\n"
        "Ctrl-C stops: runs commit what they have and go on when they are started again"
    )


def read_deployments(file: Path) -> list[dict[str, Any]]:
    """The entries of a Prefect file. Raises RequestError."""
    try:
        content = yaml.safe_load(read_regular_text(file, RECORD_LIMIT_BYTES))
    except (OSError, ValueError, yaml.YAMLError) as exc:
        raise RequestError(
            f"the deployments cannot be read: {exc}", field="--file", value=file, remedy="Give the path of deployments/prefect.yaml."
        ) from exc
    entries = content.get("deployments") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and {"name", "entrypoint"} <= entry.keys() for entry in entries):
        raise RequestError(
            "this file lists no deployments with name and entrypoint", field="--file", value=file, remedy="See deployments/prefect.yaml."
        )
    return list(entries)


def name_of(entry: dict[str, Any]) -> str:
    """FLOW/DEPLOYMENT as Prefect names it."""
    return f"{load_flow(entry['entrypoint']).name}/{entry['name']}"


def load_flow(entrypoint: str) -> Any:
    """The flow object behind `module.attribute`. Raises RequestError."""
    module, _, attribute = entrypoint.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as exc:
        raise RequestError(
            f"there is no such flow ({exc})", field="entrypoint", value=entrypoint, bound="module.attribute", remedy="Correct it in --file."
        ) from exc


def to_deployment(entry: dict[str, Any]) -> "RunnerDeployment":
    """One entry as a served deployment: the same in all but the work pool, which serving has no use for."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig
    from prefect.types.entrypoint import EntrypointType

    limit, flow = entry.get("concurrency_limit"), load_flow(entry["entrypoint"])
    deployment = flow.to_deployment(
        entry["name"],
        description=entry.get("description"),
        tags=entry.get("tags"),
        parameters=entry.get("parameters"),
        schedules=to_schedules(entry),
        paused=False,
        concurrency_limit=ConcurrencyLimitConfig.model_validate(limit) if limit is not None else None,
        enforce_parameter_schema=entry.get("enforce_parameter_schema", True),
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    deployment._parameter_openapi_schema = flow.parameters  # Prefect makes it anew from the function, without the form for people
    return deployment


def to_schedules(entry: dict[str, Any]) -> "list[DeploymentScheduleCreate]":
    """The schedules of an entry, as the server takes them."""
    from prefect.client.schemas.actions import DeploymentScheduleCreate

    return [
        DeploymentScheduleCreate(
            schedule={name: schedule[name] for name in SCHEDULE_FIELDS if name in schedule},  # type: ignore[arg-type]
            **{name: schedule[name] for name in ("active", "slug", "parameters", "max_scheduled_runs") if name in schedule},
        )
        for schedule in entry.get("schedules", ())
    ]


def _say(text: str) -> None:
    print(f"mem: {text}", file=sys.stderr, flush=True)
