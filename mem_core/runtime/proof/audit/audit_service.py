"""The audit of one run: some of what can be trained again is drawn, trained again, and held against the journal."""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mem_core.core.audit.course import course_of, plan_changes_within
from mem_core.core.audit.machines import machine_notes
from mem_core.core.audit.stretches import FRESH, Stretch, coverage_of, drawn
from mem_core.core.run.reshard import shape_of, with_shape
from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.domain.results.audit import AuditCertificate, AuditedOn, AuditedSegment
from mem_core.infrastructure.machine.observe import cpu_kind, package_versions
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.models.facts import describe_model
from mem_core.runtime.proof.audit.against import Ends, held_against
from mem_core.runtime.proof.audit.examined import ExaminedRun, examine_run
from mem_core.runtime.proof.audit.kept import Kept, reasons_against
from mem_core.runtime.proof.audit.redo import Beginning, NotRedone, train_again
from mem_core.runtime.proof.deep_verify import ranks_for_a_while, spec_of
from mem_core.runtime.ranks.port import Ranks
from mem_core.runtime.ranks.worker.protocol import WorkerSpec
from mem_core.runtime.session.opening.refusals import refuse_other_model
from mem_core.runtime.session.opening.wiring import fresh_position

Say = Callable[[str], None]
LendRanks = Callable[[WorkerSpec, Settings], AbstractContextManager[tuple[Ranks, Path]]]
"""Ranks and a folder for what they leave, both for the length of a block."""


@dataclass(frozen=True)
class AuditOrder:
    """Which run (its record and journal lie in `folder`, its checkpoints in `kept`; `place` is for people), and how much of it."""

    folder: Path
    kept: Kept
    place: str
    num_segments: int
    seed: int


def audit_run(order: AuditOrder, settings: Settings, say: Say, lend_ranks: LendRanks = ranks_for_a_while) -> AuditCertificate:
    """Draw, train again, compare. Nothing is written into the run's folder.

    Raises:
        RequestError: no such run, another model or encoding, or a key is missing. DataError: other data. NoValidCheckpoint: nothing of it
            can be trained again. StoreUnavailable: it cannot be read.
    """
    started_s = time.monotonic()
    run = examine_run(order.folder, order.kept)
    chosen = drawn(run.possible, order.num_segments, order.seed)
    say(f"{len(chosen)} of {len(run.possible)} segments that can be trained again, drawn with seed {order.seed}")
    refuse_other_model(run.record, describe_model(run.record.request.model.source, settings.model_cache_dir).fingerprint)
    spec = spec_of(run.record, settings)
    key = settings.manifest_key.encode() if settings.manifest_key else None
    with lend_ranks(spec, settings) as (ranks, room):
        auditor = Auditor(run, order.kept, ranks, spec, room, key)
        segments = tuple(auditor.audited(stretch, say) for stretch in chosen)
    return _certificate(order, run, chosen, segments, time.monotonic() - started_s)


@dataclass(frozen=True)
class Auditor:
    """Trains stretches of one run again, one after the other. `room`: a folder for what is saved at their ends, and removed at once."""

    run: ExaminedRun
    kept: Kept
    ranks: Ranks
    spec: WorkerSpec
    room: Path
    key: bytes | None = None

    def audited(self, stretch: Stretch, say: Say) -> AuditedSegment:
        """One stretch with its verdict; what this machine cannot do is part of the verdict, never an error."""
        started_s = time.monotonic()
        where = f"steps {stretch.from_step + 1:,} to {stretch.to_step:,}"
        say(f"{where}: training again from {stretch.begins_with if stretch.begins_with == FRESH else 'the checkpoint'}")
        segment = self._judged(stretch, lambda text: say(f"{where}: {text}"))
        segment = segment.model_copy(update={"duration_s": time.monotonic() - started_s})
        say(f"{where}: {segment.status.replace('_', ' ')}{': ' + segment.reasons[0] if segment.reasons else ''}")
        return segment

    def _judged(self, stretch: Stretch, say: Say) -> AuditedSegment:
        segment = self._segment(stretch)
        try:
            with ExitStack() as held:
                if stretch.begins_with == FRESH:
                    return self._redone(segment, stretch, Beginning(None, fresh_position(self.run.record.request)), say)
                folder = held.enter_context(self.kept.at_hand(stretch.from_step))
                reasons = reasons_against(folder, stretch.from_step, self.run.identity, self.key)
                if reasons:
                    text = f"the checkpoint of step {stretch.from_step} does not prove itself: {'; '.join(reasons)}"
                    return segment.model_copy(update={"status": "unproven", "reasons": (text,)})
                return self._redone(segment, stretch, Beginning(folder, self.run.sound[stretch.from_step].manifest.position), say)
        except (NotRedone, NoValidCheckpoint, OSError) as exc:
            return segment.model_copy(update={"status": "not_redone", "reasons": (str(exc),)})

    def _segment(self, stretch: Stretch) -> AuditedSegment:
        """What is known of it before anything is done."""
        record, told = self.run.record, self.run.told
        shape = own = shape_of(record.request)
        if stretch.begins_with != FRESH:
            manifest = self.run.sound[stretch.from_step].manifest
            shape = manifest.num_ranks, manifest.zero_stage
        threads = record.threads_per_rank if shape == own else told.threads_of(shape[0]) or record.threads_per_rank
        return AuditedSegment(
            from_step=stretch.from_step, to_step=stretch.to_step, begins_with=stretch.begins_with, status="not_redone", num_ranks=shape[0],
            zero_stage=shape[1], threads_per_rank=threads, trained_on=told.trained_on(stretch.commit.attempt),
        )  # fmt: skip

    def _redone(self, segment: AuditedSegment, stretch: Stretch, beginning: Beginning, say: Say) -> AuditedSegment:
        """Trained again under the recorded plans, values and omissions, and compared."""
        later = self.run.later
        course = course_of(beginning.position, stretch.to_step, later, self.run.told.left_out)
        position = beginning.position.model_copy(update={"memory_plan_changes": later.memory_plan_changes})
        request = with_shape(self.spec.request, segment.num_ranks, segment.zero_stage)
        spec = replace(self.spec, request=request, num_threads=segment.threads_per_rank)
        segment = segment.model_copy(
            update={
                "hyperparams": tuple(piece.hyperparams for piece in course.pieces),
                "left_out_batches": course.left_out,
                "num_plan_changes": plan_changes_within(later, position.batch_index, course.end_batch),
            }
        )
        staging = self.room / checkpoint_name(stretch.to_step)
        staging.mkdir()
        try:
            redone = train_again(self.ranks, spec, replace(beginning, position=position), course, staging, say)
            with ExitStack() as held:
                end = self._recorded_end(stretch.to_step, held) if redone.weights_digest != stretch.commit.weights_digest else None
                return held_against(segment, self.run, stretch, course, redone, Ends(staging, end))
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _recorded_end(self, step: int, held: ExitStack) -> Path | None:
        """The run's own checkpoint at the end of a stretch, where it is still there and sound: for the distance alone."""
        if step not in self.run.sound:
            return None
        try:
            folder = held.enter_context(self.kept.at_hand(step))
        except NoValidCheckpoint:
            return None
        return None if reasons_against(folder, step, self.run.identity, self.key) else folder


def _certificate(
    order: AuditOrder, run: ExaminedRun, chosen: tuple[Stretch, ...], segments: tuple[AuditedSegment, ...], duration_s: float
) -> AuditCertificate:
    redone = [stretch for stretch, segment in zip(chosen, segments, strict=True) if segment.weights_digest.redone]
    coverage, last = coverage_of(run.told, run.possible, redone), run.told.commits[-1]
    here = AuditedOn(cpu=cpu_kind(), versions=package_versions())
    return AuditCertificate(
        equal=all(segment.status == "equal" for segment in segments) and not run.findings,
        run_id=run.record.run_id, place=order.place, seed=order.seed, asked_segments=order.num_segments, segments=segments,
        coverage=coverage, redone_share=coverage.redone_share, findings=run.findings, not_audited=run.not_possible,
        notes=machine_notes(here, [segment.trained_on for segment in segments]), device=run.record.device, dtype=run.record.dtype,
        last_step=last.step, weights_digest=last.weights_digest, trajectory_digest=last.trajectory_digest,
        journal_sha256=run.journal_sha256, record_sha256=run.record_sha256, audited_on=here, issued_unix_s=time.time(),
        duration_s=duration_s,
    )  # fmt: skip
