"""The restore drill: proves, in processes of its own, that a run could be resumed from its newest checkpoint today."""

import json
import os
import subprocess
import sys
from typing import Annotated, Any, Literal

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from pydantic import Field

from flows.commands.owned import run_to_end
from flows.context import is_deployed
from flows.flow_request import RunId, refuse_relative_store
from flows.mem_flow import mem_flow
from mem_core.domain import errors
from mem_core.domain.errors import InternalError, MemError, NoValidCheckpoint
from mem_core.domain.printable import printable
from mem_core.infrastructure.machine.process_facts import refuse_lost_working_folder
from mem_core.infrastructure.machine.store import local_path

DEADLINE_S = 3_600.0
PROBE = "flows.commands.restore_probe"


@mem_flow(name="restore-drill", flow_run_name="drill-{run_id}", persist_result=False, validate_parameters=True)
def restore_drill(
    run_id: Annotated[RunId, Field(title="Run id", description="The run whose newest checkpoint is proven.")],
    store: Annotated[str, Field(description="Local folder that holds run folders.")] = "./runs",
    level: Annotated[
        Literal["integrity", "replay"],
        Field(description="integrity reads and hashes every file; replay also restores in fresh processes and takes steps again."),
    ] = "replay",
) -> Any:
    """Restore a run's newest checkpoint in fresh processes and step on, as a resume would. Changes nothing; fails when it is not good.

    Args:
        run_id: The run whose newest checkpoint is proven.
        store: Local folder that holds run folders.
        level: integrity reads and hashes every file; replay also restores in fresh processes and takes steps again.
    """
    refuse_lost_working_folder()
    if is_deployed():
        refuse_relative_store(store)
    verdicts = prove_newest(str(local_path(store) / run_id), level)
    create_table_artifact(verdicts, key="mem-restore-drill", description=f"run {run_id}")
    for verdict in verdicts:
        said = f"good{', steps ' + verdict['steps'] if verdict['steps'] else ''}" if verdict["valid"] else verdict["reasons"]
        get_run_logger().info("step %s of %s: %s", verdict["step"], run_id, printable(said))
    bad = [f"step {verdict['step']}: {verdict['reasons']}" for verdict in verdicts if not verdict["valid"]]
    if bad:
        raise NoValidCheckpoint(
            f"{run_id} could not be resumed from its newest checkpoints: {' | '.join(bad)}",
            remedy="Start the run again: it goes back to the newest good one. Find out what damages the store.",
        )
    return verdicts


@task(name="prove-newest", task_run_name="prove the newest, {level}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def prove_newest(folder: str, level: str) -> list[dict[str, Any]]:
    """Verdicts about the newest checkpoint (see `flows.commands.restore_probe`), reached by fresh processes that die with this one.

    Raises:
        NoValidCheckpoint: the run has none. MemError: it cannot be judged. InternalError: the process gave no answer.
    """
    try:
        done = run_to_end([sys.executable, "-P", "-m", PROBE, folder, str(os.getpid()), level], timeout_s=DEADLINE_S)
    except subprocess.TimeoutExpired as exc:
        raise InternalError(f"no verdict within {DEADLINE_S:.0f} s", remedy="Is the disk that slow? Report it otherwise.") from exc
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if done.returncode == 0 and isinstance(answer, list):
        return answer
    if isinstance(answer, dict) and "error" in answer:
        raise error_from(answer)
    raise InternalError(f"the judging process failed: {done.stderr[-500:]}", remedy="Report this as a bug with the lines above.")


def error_from(told: dict[str, Any]) -> MemError:
    """The error that the judging process met, as itself."""
    kind = getattr(errors, told["error"], InternalError)
    return kind(told["problem"], remedy=told["remedy"], field=told["field"], value=told["value"], bound=told["bound"])
