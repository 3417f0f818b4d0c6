"""A run goes on only with the kind of machine, the data, the model and the checkpoints that it was born with."""

from mem_core.core.run.belonging import Birth, CheckpointWords, belonging_of
from mem_core.core.run.state_manager import RunRecord
from mem_core.domain.environment import EnvironmentReport
from mem_core.domain.errors import DataError, NoValidCheckpoint, RequestError
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ManifestDamaged, SignatureRefused
from mem_core.runtime.data.values import PreparedData
from mem_core.runtime.models.encoding import differences
from mem_core.runtime.models.facts import ModelFacts
from mem_core.runtime.models.folders import is_preset


def refuse_other_machine(record: RunRecord, environment: EnvironmentReport) -> None:
    """Raises RequestError: another device or number format."""
    for field, before, now in (("device", record.device, environment.device), ("model.dtype", record.dtype, environment.dtype)):
        if before != now:
            raise RequestError(
                f"run {record.run_id} was born on {before} and this machine would go on with {now}",
                field=field, value=now, bound=before, remedy=f"Resume where {before} is available, or use a new run_id.",
            )  # fmt: skip


def refuse_other_inputs(record: RunRecord, data: PreparedData, model: ModelFacts) -> None:
    """Raises DataError: other data. RequestError: another encoding of it, or another model."""
    refuse_other_data(record, data, "Restore the files as they were, or use a new run_id for the new data.")
    if record.model_fingerprint != model.fingerprint:
        raise RequestError(
            f"the model of run {record.run_id} has changed since it was born",
            field="model.source",
            value=model.fingerprint[:16],
            bound=record.model_fingerprint[:16],
            remedy="Restore the model folder as it was, or use a new run_id.",
        )


def refuse_other_data(record: RunRecord, data: PreparedData, remedy: str) -> None:
    """The encoding first: where it is another one, the fingerprint is too, and nobody has touched the data.

    Raises:
        RequestError: the same text would have other token ids, part by part why. DataError: other data.
    """
    changed = differences(record.encoding, data.encoding)
    if changed:
        raise RequestError(
            f"the encoding of run {record.run_id} has changed since it was born, and its text may have other token ids now: "
            + "; ".join(changed),
            field="model.source",
            value=record.request.model.source,
            remedy="Restore the tokenizer's files and install the versions that the run was born with, or use a new run_id.",
        )
    if record.data_fingerprint != data.fingerprint:
        what = "data" if record.encoding or is_preset(record.request.model.source) else "data, or a file of its tokenizer,"
        raise DataError(
            f"the {what} of run {record.run_id} has changed since it was born",
            field="data.train",
            value=data.fingerprint[:16],
            bound=record.data_fingerprint[:16],
            remedy=remedy,
        )


def refuse_other_life(catalog: Catalog, run_id: str, birth: Birth, words: CheckpointWords) -> tuple[str, ...]:
    """Before a run that has saved nothing yet becomes the owner of what lies in its folder. Returns what people should be told.

    Its journal and record may have been lost, or the folder may have been brought from elsewhere. What was born with other values is
    refused and nothing is touched: resuming would give other weights, and saving would rotate somebody's work away.

    Raises:
        NoValidCheckpoint: checkpoints of this run id are of another life.
    """
    if words.any_said:
        return ()
    notes: list[str] = []
    for step in catalog.steps():
        try:
            present = catalog.read(step)
        except SignatureRefused as exc:
            raise _another_life(catalog, run_id, step, str(exc)) from exc
        except (FileNotFoundError, ManifestDamaged):
            continue  # nothing that anybody could go on from: quarantined, or overwritten by this run
        manifest = present.manifest
        if manifest.run_id != run_id:
            notes.append(f"the checkpoint of step {step} belongs to run {manifest.run_id}; it is left alone")
            continue
        foreign = belonging_of(manifest, present.sha256, birth, words).foreign
        if foreign:
            raise _another_life(catalog, run_id, step, "; ".join(foreign))
    return tuple(notes)


def _another_life(catalog: Catalog, run_id: str, step: int, why: str) -> NoValidCheckpoint:
    return NoValidCheckpoint(
        f"checkpoints of another life of run {run_id} lie in {catalog.folder}: step {step}: {why}",
        remedy=f"Give another run_id, or move {catalog.folder} away to begin anew; nothing was touched.",
    )
