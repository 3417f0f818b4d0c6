"""Task: the policy engine's decision for a segment. Without a planner nothing can change and no task run is spent on it."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from mem_core.core.recovery.actions import Train
from tasks.running import session_of


def decide_hyperparams(key: str, segment: Train) -> None:
    """Decide for one segment; a task run only where somebody proposes something."""
    if session_of(key).advice.has_planner:
        decide(key, segment.segment_index, segment.from_step, segment.until_step)
    else:
        session_of(key).decide(segment)


@task(name="policy", task_run_name="policy for steps {from_step}-{until_step}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def decide(key: str, segment_index: int, from_step: int, until_step: int) -> dict[str, float]:
    """Record and return what reaches the engine."""
    return session_of(key).decide(Train(segment_index, from_step, until_step)).model_dump(mode="json")
