"""For the doctor: would the run that lies in the folder already go on with this request? Reads only, in training's own words.

What only preparation can tell stays with it: whether the data has changed since.
"""

from dataclasses import dataclass
from pathlib import Path

from mem_core.core.results.length import going_on_in_steps
from mem_core.core.run.belonging import CheckpointWords, birth_of
from mem_core.core.run.reconcile import reconcile
from mem_core.core.run.record import RunRecord, read_record
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import MemError, RunHeld
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.session.opening.birth import born
from mem_core.runtime.session.opening.refusals import refuse_other_life, refuse_other_machine, refuse_other_model

_SHAPE_CHECKS = ("saved_layout", "saved_stage")
_UNKNOWN = "data"  # the fingerprint that is only known when every row has been read


@dataclass(frozen=True)
class Resuming:
    """What may differ from the birth of the run, as `OpeningOptions` has it; the key that manifests are signed with; fetched models."""

    allow_reshard: bool = False
    as_born: tuple[str, ...] = ()
    manifest_key: str | None = None
    model_cache_dir: Path | None = None


def problems_of_run(folder: Path, request: RuntimeRequest, report: EnvironmentReport, options: Resuming) -> tuple[MemError, ...]:
    """Why a run in `folder` could not go on with the request, as training would say it; nothing where it can, or there is none.

    Nothing either while somebody holds it: that comes first for training, too, and what the folder says then is still moving.
    """
    if any(finding.exit_code == RunHeld.exit_code for finding in report.failures):
        return ()
    try:
        record = read_record(folder)
        catalog = Catalog(OsDisk(), folder, request.run_id, options.manifest_key.encode() if options.manifest_key else None)
        if record is None and not catalog.steps():
            return ()
        fingerprint = describe_model(request.model.source, options.model_cache_dir).fingerprint
        if record is not None:
            shape_was_judged = any(finding.check in _SHAPE_CHECKS for finding in report.findings)
            asked = going_on_in_steps(record.length, record.request, request, options.as_born)
            reconcile(record.request, asked, allow_reshard=options.allow_reshard or shape_was_judged, as_born=options.as_born)
            refuse_other_machine(record, report)
            refuse_other_model(record, fingerprint)
        _refuse_other_life(catalog, folder, record or born(request, report, fingerprint, "", {}))
    except MemError as exc:
        return (exc,)
    return ()


def _refuse_other_life(catalog: Catalog, folder: Path, record: RunRecord) -> None:
    birth = {name: value for name, value in birth_of(record).items() if name != _UNKNOWN or value}
    words = CheckpointWords(line.event for line in read_journal(folder / "journal"))
    refuse_other_life(catalog, record.run_id, birth, words)
