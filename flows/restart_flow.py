"""The guard over restarts: started by the automation `mem-restart-crashed-training` for each crash of a training run."""

from typing import Annotated
from uuid import UUID

from prefect import flow
from prefect.logging import get_run_logger
from pydantic import Field

from flows.server.restarts import restart_or_give_up
from mem_core.domain.printable import printable


@flow(name="restart", flow_run_name="restart-{flow_run_id}", persist_result=False, validate_parameters=True)
def restart(flow_run_id: Annotated[str, Field(description="Id of the flow run that has crashed.")]) -> str:
    """Schedule a crashed flow run again, three times at most without a new checkpoint; then it is Failed with the reason.

    Args:
        flow_run_id: Id of the flow run that has crashed.
    """
    done = restart_or_give_up(UUID(flow_run_id))
    get_run_logger().info("%s", printable(done))
    return done
