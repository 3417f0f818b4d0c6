"""`mem checkpoints verify --deep`: fresh processes restore each checkpoint of a resting run and redo the steps after it.

The per-step numbers that the run left in `metrics/` are the evidence; where it left none (the last checkpoint), or ran in another
shape and with other threads since, the steps must be finite. Nothing is written into the run folder: workers and their logs live in
a temporary one.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mem_core.core.audit.course import hyperparams_at
from mem_core.core.run.record import RunRecord, read_record
from mem_core.core.run.reshard import shape_of, with_shape
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import CheckpointManifest, TrainingPosition
from mem_core.domain.errors import RequestError
from mem_core.domain.events import BatchSkipped, SegmentEnded
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.infrastructure.telemetry.metrics import Columns, read_metrics
from mem_core.infrastructure.telemetry.progress import NoProgress
from mem_core.runtime.checkpoint_manager.catalog import Catalog
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.proof.replay_service import UNRECORDED_STEPS, ReplayService, batch_after
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.ranks.local.ranks import LocalRanks
from mem_core.runtime.ranks.worker.protocol import ReplayEvidence, WorkerSpec
from mem_core.runtime.session.opening.compiling import compiled_as_recorded
from mem_core.runtime.session.opening.prepare_service import prepare_tokens, with_model_at_hand
from mem_core.runtime.session.opening.refusals import refuse_other_data

Stepping = Callable[[Path, CheckpointManifest], tuple[str, ...]]


@contextmanager
def stepping(folder: Path, settings: Settings, say: Callable[[str], None], server: ForkServer | None = None) -> Iterator[Stepping]:
    """A function that restores a checkpoint of this run, steps, and gives the reasons why it is bad; empty if it is good.

    `server`: somebody's fork server to fork from; otherwise one is started for the length of the block.

    Raises:
        RequestError: no such run. DataError: the data is not what the run was born with.
    """
    record = read_record(folder)
    if record is None:
        raise RequestError("there is no such run", field="RUN", value=folder, remedy="Give a run id with --store, or a run folder.")
    spec = spec_of(record, settings)
    columns = read_metrics(folder / "metrics")
    newest = newest_position(folder, settings)
    skips, failed = left_out(folder), failed_batches(folder)
    with ranks_for_a_while(spec, settings, server) as (ranks, _):

        def step(path: Path, manifest: CheckpointManifest) -> tuple[str, ...]:
            same_shape = (manifest.num_ranks, manifest.zero_stage) == shape_of(record.request)
            evidence = recorded_steps(columns, newest, manifest, skips) if same_shape else None
            say(f"step {manifest.step:>9,}  restoring; {len(evidence.losses) if evidence else 'no'} recorded steps to compare with")
            position = manifest.position.model_copy(update={"memory_plan_changes": newest.memory_plan_changes}) if evidence else None
            shaped = replace(spec, request=with_shape(spec.request, manifest.num_ranks, manifest.zero_stage))
            replay = ReplayService(ranks, shaped, lambda number, deadline_s: evidence, lambda: skips, lambda: failed)
            return replay(path, manifest.model_copy(update={"position": position}) if position else manifest)

        yield step


@contextmanager
def ranks_for_a_while(spec: WorkerSpec, settings: Settings, server: ForkServer | None = None) -> Iterator[tuple[LocalRanks, Path]]:
    """Ranks for a run that rests, and a folder for what they leave: both are gone after the block, and the run folder is not touched.

    `server`: somebody's fork server to fork from; otherwise one is started for the length of the block.
    """
    with tempfile.TemporaryDirectory(prefix="mem-verify-") as temporary:
        logs = Path(temporary) / "logs"
        used = server or ForkServer.start(child_environment(settings, device=spec.device, threads_per_rank=spec.num_threads), logs)
        used.log_into(logs)
        try:
            yield LocalRanks(used, Path(temporary) / "live"), Path(temporary)
        finally:
            if server is None:
                used.close()


def spec_of(record: RunRecord, settings: Settings) -> WorkerSpec:
    """What a rank of this run needs, from its record alone; token shards are made anew where the cache has lost them."""
    request = record.request
    model = describe_model(request.model.source, settings.model_cache_dir)
    data = prepare_tokens(request, settings, model.vocab_size, NoProgress(), record)
    refuse_other_data(record, data, "Steps can only be redone on the data of the run; restore the files, or verify without --deep.")
    at_hand = with_model_at_hand(request, settings)
    return WorkerSpec(
        request=at_hand, device=record.device, dtype=record.dtype,  # type: ignore[arg-type]
        num_threads=record.threads_per_rank, data_folder=data.train_dir, validation_folder=None, pad_token_id=data.pad_token_id,
        default_plan=record.default_plan, router_loss=record.router_loss, compiled=compiled_as_recorded(record),
    )  # fmt: skip


def newest_position(folder: Path, settings: Settings) -> TrainingPosition:
    """Position of the newest checkpoint: its histories say under which values and plans every earlier batch ran."""
    key = settings.manifest_key.encode() if settings.manifest_key else None
    own = Catalog(OsDisk(), folder, folder.name, key).own()
    return own[max(own)][0].position if own else TrainingPosition(applied_steps=0, batch_index=0)


def left_out(folder: Path) -> tuple[int, ...]:
    """Batches that the run leaves out for good, from its journal."""
    found = {line.event.batch_index for line in read_journal(folder / "journal") if isinstance(line.event, BatchSkipped)}
    return tuple(sorted(found))


def failed_batches(folder: Path) -> frozenset[int]:
    """Batches at which the run itself ever failed, from its journal."""
    outcomes = (line.event.outcome for line in read_journal(folder / "journal") if isinstance(line.event, SegmentEnded))
    found = (outcome.evidence.batch_index for outcome in outcomes if not isinstance(outcome, SegmentCompleted | SegmentInterrupted))
    return frozenset(index for index in found if index is not None)


def recorded_steps(
    columns: Columns, newest: TrainingPosition, manifest: CheckpointManifest, skips: tuple[int, ...] = ()
) -> ReplayEvidence | None:
    """The first steps that the run did after this checkpoint and committed; None where there are none."""
    first = manifest.position.batch_index
    if newest.batch_index <= first:
        return None
    after = batch_after(first, UNRECORDED_STEPS, skips)
    rows = [int(row) for row in range(len(columns["batch_index"])) if first <= columns["batch_index"][row] < after]
    expected = [index for index in range(first, after) if index not in skips]
    if [int(columns["batch_index"][row]) for row in rows] != expected[: len(rows)] or not rows:
        return None
    norms = [float(columns["grad_norm"][row]) for row in rows]
    return ReplayEvidence(
        step=manifest.step,
        hyperparams=hyperparams_at(newest, first),
        losses=tuple(float(columns["loss"][row]) for row in rows),
        grad_norms=tuple(None if norm != norm else norm for norm in norms),
    )
