"""Task: ops and token shards, each made once and found again at once."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.running import DRIVEN


@task(name="prepare", task_run_name="prepare", cache_policy=NO_CACHE, persist_result=False, retries=0)
def prepare_run(key: str) -> dict[str, int]:
    """Prepare what the first step needs; returns a few numbers about the data."""
    run = DRIVEN.run(key)
    data = run.prepare().data
    for note in data.notes:
        run.order.progress.note(f"data: {note}")
    return {"num_samples": data.num_samples, "num_tokens": data.num_tokens, "num_bad_rows": data.num_bad_rows}
