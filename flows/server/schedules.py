"""Schedules of a served deployment: those of the file for the first time, and from then on what people have made of them.

Prefect replaces all schedules of a deployment by those that it is deployed with.
"""

from collections.abc import Sequence
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.exceptions import ObjectNotFound


def kept_schedules(
    client: SyncPrefectClient, name: str, wanted: Sequence[DeploymentScheduleCreate]
) -> tuple[list[DeploymentScheduleCreate], list[str]]:
    """What to deploy FLOW/DEPLOYMENT with, and a line for each schedule that stays other than the file has it."""
    try:
        found = client.read_deployment_by_name(name).schedules
    except ObjectNotFound:
        return list(wanted), []
    merged = merge_schedules(wanted, found)
    asked = {schedule.slug: schedule for schedule in wanted}
    return merged, [_said(name, asked[schedule.slug], schedule) for schedule in merged if _differs(asked.get(schedule.slug), schedule)]


def merge_schedules(wanted: Sequence[DeploymentScheduleCreate], found: Sequence[DeploymentSchedule]) -> list[DeploymentScheduleCreate]:
    """Pure. The schedules that the server has, as they stand there, and those of the file whose slug it does not have."""
    slugs = {schedule.slug for schedule in found if schedule.slug}
    return [_as_it_stands(schedule) for schedule in found] + [schedule for schedule in wanted if schedule.slug not in slugs]


def _as_it_stands(schedule: DeploymentSchedule) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(
        schedule=schedule.schedule,
        active=schedule.active,
        max_scheduled_runs=schedule.max_scheduled_runs,
        parameters=schedule.parameters,
        slug=schedule.slug,
    )


def _differs(asked: DeploymentScheduleCreate | None, stands: DeploymentScheduleCreate) -> bool:
    return asked is not None and _values(asked) != _values(stands)


def _values(schedule: DeploymentScheduleCreate) -> dict[str, Any]:
    return schedule.model_dump(mode="json", exclude={"replaces"})


def _said(name: str, asked: DeploymentScheduleCreate, stands: DeploymentScheduleCreate) -> str:
    differing = ", ".join(field for field, value in _values(asked).items() if _values(stands)[field] != value)
    return (
        f"schedule {stands.slug} of {name} stays {'on' if stands.active else 'off'} as it stands on the server, other than in the file "
        f"({differing}); to go back to the file, delete it in the UI and start again"
    )
