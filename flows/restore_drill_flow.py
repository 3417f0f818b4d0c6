"""The restore drill: proves, in a process of its own, that a run's newest checkpoint could be resumed from today."""

import json
import os
import subprocess
import sys
from typing import Annotated, Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from pydantic import Field

from flows.flow_context import is_deployed
from flows.flow_request import refuse_relative_store
from flows.mem_flow import mem_flow
from mem_core.domain.errors import InternalError, NoValidCheckpoint
from mem_core.infrastructure.machine_store import local_path

DEADLINE_S = 3_600.0


@mem_flow(name="restore-drill", flow_run_name="drill-{run_id}", persist_result=False, validate_parameters=True)
def restore_drill(
    run_id: Annotated[str, Field(title="Run id", description="The run whose newest checkpoint is proven.")],
    store: Annotated[str, Field(description="Local folder that holds run folders.")] = "./runs",
) -> Any:
    """Read, hash and judge the newest checkpoint of a run in a fresh process. Changes nothing; fails when it is not good.

    Args:
        run_id: The run whose newest checkpoint is proven.
        store: Local folder that holds run folders.
    """
    if is_deployed():
        refuse_relative_store(store)
    folder = local_path(store) / run_id
    verdict = prove_newest(str(folder))
    create_table_artifact([verdict], key="mem-restore-drill", description=f"run {run_id}")
    get_run_logger().info("step %s of %s: %s", verdict["step"], run_id, "good" if verdict["valid"] else verdict["reasons"])
    if not verdict["valid"]:
        raise NoValidCheckpoint(
            f"the newest checkpoint of {run_id} (step {verdict['step']}) is not good: {verdict['reasons']}",
            remedy="Start the run again: it goes back to the newest good one. Find out what damages the store.",
        )
    return verdict


@task(name="prove-newest", cache_policy=NO_CACHE, persist_result=False, retries=0)
def prove_newest(folder: str) -> dict[str, Any]:
    """The verdict about the newest committed checkpoint, reached by a fresh process that dies with this one.

    Raises:
        NoValidCheckpoint: the run has none. InternalError: the process gave no answer.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flows.restore_probe", folder, str(os.getpid())],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise InternalError(f"no verdict within {DEADLINE_S:.0f} s", remedy="Is the disk that slow? Report it otherwise.") from exc
    if done.returncode == NoValidCheckpoint.exit_code:
        raise NoValidCheckpoint("there is no committed checkpoint", value=folder, remedy="Give the store and id of a run that has one.")
    if done.returncode != 0:
        raise InternalError(f"the judging process failed: {done.stderr[-500:]}", remedy="Report this as a bug with the lines above.")
    return json.loads(done.stdout)
