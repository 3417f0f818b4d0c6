"""Task: commit, judge and rotate one checkpoint, while the next segment already trains."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from mem_core.runtime.session.checkpoint_service import SaveResult
from tasks.running import session_of


@task(name="validate-checkpoint", task_run_name="checkpoint {step}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def validate_checkpoint(key: str, step: int) -> SaveResult:
    """What became of the save of `step`; a bad verdict is a result, not an error."""
    return session_of(key).complete_save(step)
