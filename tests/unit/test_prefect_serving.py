"""What `mem serve` makes of its file and of what people have changed since; which crashed runs are scheduled again."""

import datetime
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule, State, StateType
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.exceptions import ObjectNotFound

from flows.commands.owned import run_to_end
from flows.server.pauses import pause_while_away, paused_by_people
from flows.server.restarts import MAX_RESTARTS, GiveUp, LeaveAlone, Restart, judge
from flows.server.schedules import merge_schedules
from flows.server.serve import DEPLOYMENTS_FILE, load_flow, read_deployments, serving, to_schedules
from mem_core.domain.errors import RequestError

START = datetime.datetime(2026, 11, 30, 12, 0, tzinfo=datetime.UTC)
WEEKLY = DeploymentScheduleCreate(schedule=CronSchedule(cron="0 3 * * 1", timezone="UTC"), active=False, slug="weekly", parameters={"a": 1})
Story = list[tuple[StateType, str, str]]
BORN: Story = [(StateType.SCHEDULED, "Scheduled", "")]
CRASH: Story = [(StateType.PENDING, "Pending", ""), (StateType.CRASHED, "Crashed", "exited with status 1")]
TRAINED: Story = [(StateType.PENDING, "Pending", ""), (StateType.RUNNING, "Running", "")]
AGAIN: Story = [(StateType.SCHEDULED, "AwaitingRetry", "restarted after a crash (1 of 3 without progress)")]
LATE: Story = [(StateType.SCHEDULED, "Late", ""), (StateType.SCHEDULED, "AwaitingConcurrencySlot", "")]
PERSON_IN_UI: Story = [(StateType.SCHEDULED, "AwaitingRetry", "Retry from the Prefect UI")]
PERSON_AT_PROMPT: Story = [(StateType.SCHEDULED, "Scheduled", "Retried via CLI")]
FAILED: Story = [(StateType.FAILED, "Failed", "NoProgress: ...")]


def history(*parts: Story) -> list[State[Any]]:
    """A state a second."""
    told = [item for part in parts for item in part]
    return [
        State(type=kind, name=name, message=message, timestamp=START + datetime.timedelta(seconds=number))
        for number, (kind, name, message) in enumerate(told)
    ]


@pytest.mark.parametrize("restarts", range(MAX_RESTARTS))
def test_a_crashed_run_is_scheduled_again_three_times_at_most(restarts: int) -> None:
    assert judge(history(BORN, CRASH, *[AGAIN, LATE, CRASH] * restarts), None) == Restart(restarts + 1)
    assert judge(history(BORN, CRASH, *[AGAIN, LATE, CRASH] * (MAX_RESTARTS + restarts)), None) == GiveUp("exited with status 1")


@pytest.mark.parametrize("fresh_start", [PERSON_IN_UI, PERSON_AT_PROMPT, FAILED + PERSON_AT_PROMPT], ids=["ui", "prompt", "failed"])
def test_whoever_starts_it_by_hand_starts_the_count_anew(fresh_start: Story) -> None:
    assert judge(history(BORN, CRASH, *[AGAIN, CRASH] * 3, fresh_start, CRASH), None) == Restart(1)
    assert judge(history(BORN, CRASH, *[AGAIN, CRASH] * 3, fresh_start, CRASH, *[AGAIN, CRASH] * 3), None) == GiveUp("exited with status 1")


def test_a_new_checkpoint_starts_the_count_anew() -> None:
    """A run that crashes each hour and gets on in between goes on for ever."""
    told = history(BORN, CRASH, *[AGAIN, CRASH] * 2, AGAIN, TRAINED, CRASH)
    validated = told[-2].timestamp + datetime.timedelta(milliseconds=500)
    assert judge(told, validated) == Restart(1)
    assert judge(told, told[0].timestamp) == GiveUp("exited with status 1"), "that was long ago"


def test_a_run_that_is_not_crashed_any_more_is_left_alone() -> None:
    assert judge(history(BORN, CRASH, AGAIN), None) == LeaveAlone("AwaitingRetry")
    assert judge(history(BORN, CRASH, AGAIN, TRAINED), None) == LeaveAlone("Running")
    assert judge([], None) == LeaveAlone("unknown")


def test_what_people_have_made_of_schedules_stays_and_the_file_adds_what_is_new() -> None:
    switched_on = DeploymentSchedule(schedule=WEEKLY.schedule, active=True, slug="weekly", parameters={"a": 1})
    own = DeploymentSchedule(schedule=IntervalSchedule(interval=datetime.timedelta(hours=1)), active=True, parameters={"b": 2})
    nightly = WEEKLY.model_copy(update={"slug": "nightly"})
    merged = merge_schedules([WEEKLY, nightly], [switched_on, own])
    assert [(schedule.slug, schedule.active, schedule.parameters) for schedule in merged] == [
        ("weekly", True, {"a": 1}), (None, True, {"b": 2}), ("nightly", False, {"a": 1}),
    ]  # fmt: skip
    assert merged[1].schedule == own.schedule
    assert merge_schedules([WEEKLY], []) == [WEEKLY]


def test_every_kind_of_schedule_that_prefect_takes_is_taken() -> None:
    entries = [
        {"cron": "0 3 * * 1", "timezone": "UTC", "active": False, "slug": "weekly", "parameters": {"x": 1}},
        {"interval": 3600, "anchor_date": "2026-01-01T00:00:00Z"},
        {"rrule": "FREQ=DAILY", "timezone": "Europe/Berlin", "active": True},
    ]
    cron, interval, rrule = to_schedules({"schedules": entries})
    assert (cron.slug, cron.active, cron.parameters) == ("weekly", False, {"x": 1})
    assert isinstance(interval.schedule, IntervalSchedule)
    assert (interval.schedule.interval.total_seconds(), interval.active) == (3600, True)
    assert rrule.schedule.timezone == "Europe/Berlin"


@pytest.mark.parametrize("text", ["", "[]", "deployments: 5", "deployments: [5]", "deployments: [{name: a}]", "a: [", "\0", "\udcff"])
def test_a_file_that_lists_no_deployments_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RequestError, match="--file"):
        read_deployments(tmp_path / "file.yaml")


@pytest.mark.parametrize("entrypoint", ["flows.nothing.at_all", "flows.endurance_flow.nothing", "nothing", ""])
def test_a_flow_that_does_not_exist_is_named(entrypoint: str) -> None:
    with pytest.raises(RequestError, match="there is no such flow"):
        load_flow(entrypoint)


def test_a_command_has_ended_when_it_ends_whoever_holds_its_output() -> None:
    """A process that it leaves behind would hold a pipe open for ever."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    done = run_to_end([sys.executable, "-c", program], timeout_s=60)
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == 0


class FakeServer:
    """Deployments and variables of a Prefect server."""

    def __init__(self, *names: str) -> None:
        self.deployments = {name: SimpleNamespace(id=name, paused=False) for name in names}
        self.variables: dict[str, SimpleNamespace] = {}

    def read_deployment_by_name(self, name: str) -> Any:
        if name not in self.deployments:
            raise ObjectNotFound(Exception(name))
        return self.deployments[name]

    def pause_deployment(self, deployment_id: Any) -> None:
        self.deployments[deployment_id].paused = True

    def read_variable_by_name(self, name: str) -> Any:
        return self.variables.get(name)

    def create_variable(self, variable: Any) -> None:
        assert variable.name not in self.variables
        self.variables[variable.name] = SimpleNamespace(value=variable.value)

    def update_variable(self, variable: Any) -> None:
        self.variables[variable.name].value = variable.value

    def served(self, names: list[str], *, killed: bool = False) -> tuple[str, ...]:
        """One life of `mem serve`: what it left paused."""
        stays = paused_by_people(self, names)
        for name in names:
            self.deployments[name] = SimpleNamespace(id=name, paused=name in stays)
        if not killed:
            pause_while_away(self, names)
        return stays


NAMES = ["a/a", "b/b", "new/new"]


def test_what_a_person_paused_stays_paused_whenever_mem_serve_starts_again() -> None:
    server = FakeServer("a/a", "b/b")
    assert server.served(NAMES) == ()
    assert all(deployment.paused for deployment in server.deployments.values()), "nothing is scheduled that nobody would run"
    assert server.served(NAMES) == (), "its own pauses are no person's"
    server.served(NAMES, killed=True)
    server.pause_deployment("a/a")
    assert server.served(NAMES) == ("a/a",)
    assert server.served(NAMES) == ("a/a",), "also after it has paused the others itself"
    server.served(NAMES, killed=True)
    assert [name for name, deployment in server.deployments.items() if deployment.paused] == ["a/a"]
    server.deployments["a/a"].paused = False
    assert server.served(NAMES) == ()


def test_pauses_that_an_older_version_left_are_nobodys() -> None:
    """It paused every deployment when it ended, and kept nothing of it."""
    server = FakeServer("a/a", "b/b")
    server.pause_deployment("a/a")
    server.pause_deployment("b/b")
    assert server.served(NAMES) == ()


def test_a_program_is_told_where_runs_can_be_submitted() -> None:
    told = serving(read_deployments(DEPLOYMENTS_FILE), "http://127.0.0.1:4200/api")
    assert (told["url"], told["api_url"]) == ("http://127.0.0.1:4200", "http://127.0.0.1:4200/api")
    assert {"endurance/endurance", "finetune/finetune", "chaos-drill/chaos-drill"} <= set(told["deployments"])
