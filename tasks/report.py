"""Task: the result of the attempt, folded from the journal."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.running import session_of


@task(name="report", task_run_name="report", cache_policy=NO_CACHE, persist_result=False, retries=0)
def write_report(key: str) -> dict[str, Any]:
    """The run's result as plain values; report.html and result.json were written when the attempt closed."""
    return session_of(key).result().model_dump(mode="json")
