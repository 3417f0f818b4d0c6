"""A run goes on only with the kind of machine, the data and the model that it was born with."""

from mem_core.core.run.state_manager import RunRecord
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import DataError, RequestError
from mem_core.runtime.data.values import PreparedData
from mem_core.runtime.models.facts import ModelFacts


def refuse_other_machine(record: RunRecord, environment: EnvironmentReport) -> None:
    """Raises RequestError: another device or number format."""
    for field, before, now in (("device", record.device, environment.device), ("model.dtype", record.dtype, environment.dtype)):
        if before != now:
            raise RequestError(
                f"run {record.run_id} was born on {before} and this machine would go on with {now}",
                field=field, value=now, bound=before, remedy=f"Resume where {before} is available, or use a new run_id.",
            )  # fmt: skip


def refuse_other_inputs(record: RunRecord, data: PreparedData, model: ModelFacts) -> None:
    """Raises DataError: other data. RequestError: another model."""
    if record.data_fingerprint != data.fingerprint:
        raise DataError(
            f"the data of run {record.run_id} has changed since it was born",
            field="data.train",
            value=data.fingerprint[:16],
            bound=record.data_fingerprint[:16],
            remedy="Restore the files as they were, or use a new run_id for the new data.",
        )
    if record.model_fingerprint != model.fingerprint:
        raise RequestError(
            f"the model of run {record.run_id} has changed since it was born",
            field="model.source",
            value=model.fingerprint[:16],
            bound=record.model_fingerprint[:16],
            remedy="Restore the model folder as it was, or use a new run_id.",
        )
