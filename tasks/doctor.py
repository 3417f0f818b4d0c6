"""Task: examine the environment, then take the run folder."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from mem_core import bootstrap
from tasks.running import draft_of


@task(name="doctor", task_run_name="doctor", cache_policy=NO_CACHE, persist_result=False, retries=0)
def examine_environment(key: str) -> int:
    """Examine, refuse or take the run; returns the attempt number."""
    draft = draft_of(key)
    report = bootstrap.examine(draft)
    for finding in report.findings:
        if finding.severity in ("warning", "notice"):
            draft.progress.note(f"doctor: {finding.check}: {finding.observed}. {finding.remedy}")
    return bootstrap.acquire(draft).attempt
