"""What a run is from its first start on, and what of it may change later."""

import time
from collections.abc import Mapping

from mem_core.core.run.record import RunRecord
from mem_core.core.run.reshard import shape_of, with_shape
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest, shown_request


def born(
    asked: RuntimeRequest, environment: EnvironmentReport, model_fingerprint: str, data_fingerprint: str, encoding: Mapping[str, str]
) -> RunRecord:
    """What this run is from now on. The schedule's horizon and the first memory plan are frozen here."""
    training = asked.training
    request = asked.model_copy(
        update={"training": training.model_copy(update={"schedule_steps": training.schedule_steps or training.max_steps})}
    )
    rows_per_rank = training.global_batch_size // asked.parallel.num_ranks
    micro = asked.memory.micro_batch_size
    plan = MemoryPlan(
        micro_batch_rows=min(rows_per_rank, environment.micro_batch_rows if micro == "auto" else micro),
        activation_checkpointing=asked.model.activation_checkpointing == "on",
        offload_optimizer=asked.parallel.offload_optimizer,
    )
    return RunRecord(
        run_id=request.run_id, request=request, device=environment.device, dtype=environment.dtype, default_plan=plan,
        threads_per_rank=environment.threads_per_rank,
        data_fingerprint=data_fingerprint, model_fingerprint=model_fingerprint, versions=environment.versions,
        encoding=dict(encoding), born_unix_s=time.time(),
    )  # fmt: skip


def with_allowed_changes(record: RunRecord, request: RuntimeRequest) -> RunRecord:
    """What the run is now: more steps and the other changes that `reconcile` let pass, so that reports and drills see them. The shape
    stays: it changes when a converted checkpoint has proven itself."""
    return record.model_copy(update={"request": shown_request(with_shape(request, *shape_of(record.request)))})
