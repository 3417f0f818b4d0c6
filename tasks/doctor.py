"""Task: examine the environment, then take the run folder."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.running import DRIVEN


@task(name="doctor", task_run_name="doctor", cache_policy=NO_CACHE, persist_result=False, retries=0)
def examine_environment(key: str) -> int:
    """Examine, refuse or take the run; returns the attempt number."""
    run = DRIVEN.run(key)
    for finding in run.examine().findings:
        if finding.severity in ("warning", "notice"):
            run.order.progress.note(f"doctor: {finding.check}: {finding.observed}. {finding.remedy}")
    return run.acquire().state.attempt
