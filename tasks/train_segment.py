"""Task: train until a step. Idempotent: it reads where it stands from the run folder, so that a retry redoes only what was lost."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import task_run
from prefect.tasks import Task

from mem_core.runtime.session.run_session import RetrySegment
from tasks.running import session_of

MAX_RETRIES = 10_000  # a backstop only: `next_action` bounds the tries and raises the error that ends the run


def may_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Another try where the orchestrator asked for one; every other error ends the run."""
    try:
        state.result()
    except RetrySegment:
        return True
    except BaseException:  # noqa: BLE001 - only the kind of the error is asked here; Prefect raises it to the flow
        return False
    return False


@task(
    name="train-segment",
    task_run_name="steps {from_step}-{until_step}",
    retries=MAX_RETRIES,
    retry_delay_seconds=0,
    retry_condition_fn=may_retry,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def train_segment(key: str, segment_index: int, from_step: int, until_step: int) -> dict[str, Any]:
    """One try; returns the outcome as plain values."""
    outcome = session_of(key).train_segment(segment_index, until_step, try_number=int(task_run.run_count or 1))
    return outcome.model_dump(mode="json")
