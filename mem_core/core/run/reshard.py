"""Going on with another number of ranks or another ZeRO stage: what may change, and how that is said. Pure.

The global batch does not depend on either (I1), so the run stays the same run up to rounding.
"""

from mem_core.core.run.state_manager import RunRecord
from mem_core.domain.capabilities import convertible_stages, is_convertible
from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import RequestError
from mem_core.domain.request import ParallelSection, RuntimeRequest

_DOCTORS_CHECK = "saved_layout"
_SHAPE_NOTE = "the run goes on with "


def describe_shape(num_ranks: int, zero_stage: int) -> str:
    """`2 ranks at ZeRO stage 1`."""
    return f"{num_ranks} rank{'' if num_ranks == 1 else 's'} at ZeRO stage {zero_stage}"


def shape_note(request: RuntimeRequest) -> str:
    """What the journal says where a run has taken another shape."""
    return f"{_SHAPE_NOTE}{describe_shape(*shape_of(request))} from now on"


def is_shape_note(text: str) -> bool:
    """Whether a journal's note is one of `shape_note`."""
    return text.startswith(_SHAPE_NOTE)


def shape_of(request: RuntimeRequest) -> tuple[int, int]:
    """(ranks, ZeRO stage) that a request asks for."""
    return request.parallel.num_ranks, request.parallel.zero_stage


def with_shape(request: RuntimeRequest, num_ranks: int, zero_stage: int) -> RuntimeRequest:
    """The request as it would be with that shape."""
    parallel = request.parallel.model_dump() | {"num_ranks": num_ranks, "zero_stage": zero_stage}
    return request.model_copy(update={"parallel": ParallelSection.model_validate(parallel)})


def reshaped(record: RunRecord, request: RuntimeRequest, threads_per_rank: int) -> RunRecord:
    """What the run is from now on: the shape asked for, everything else as it was born."""
    if shape_of(record.request) == shape_of(request):
        return record
    return record.model_copy(update={"request": with_shape(record.request, *shape_of(request)), "threads_per_rank": threads_per_rank})


def refuse_inconvertible(manifest: CheckpointManifest, num_ranks: int, zero_stage: int) -> None:
    """Raises RequestError: from or to stage 0, with what is possible."""
    if is_convertible(manifest.zero_stage, zero_stage):
        return
    raise RequestError(
        f"the checkpoint of step {manifest.step} is of {describe_shape(manifest.num_ranks, manifest.zero_stage)}, "
        f"which cannot be converted to {describe_shape(num_ranks, zero_stage)}",
        field="parallel.zero_stage",
        value=zero_stage,
        bound=convertible_stages(manifest.zero_stage),
        remedy="Take one of these, or start another run_id from the exported weights.",
    )


def allow_other_shape(report: EnvironmentReport) -> EnvironmentReport:
    """The doctor's report where the user has allowed the conversion: the other shape is no failure any more."""
    changed = tuple(
        finding.model_copy(update={"severity": "notice", "exit_code": 0, "remedy": "It will be converted and proven before training."})
        if finding.check == _DOCTORS_CHECK
        else finding
        for finding in report.findings
    )
    return report.model_copy(update={"findings": changed})
