"""A run as an auditor finds it, before any step is done again: record, journal, checkpoints, and what already speaks against them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mem_core.core.audit.line import Told, told_by
from mem_core.core.audit.stretches import Stretch, not_named, out_of_reach, stretches_of
from mem_core.core.run.identity import RunIdentity, read_identity
from mem_core.core.run.journal_check import check_journal, journal_files
from mem_core.core.run.record import RunRecord, plain_text, record_of, sealed_text
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.infrastructure.telemetry.metrics import Columns, read_metrics
from mem_core.runtime.proof.audit.kept import Kept, KeptCheckpoint

MOST_NAMED = 3


@dataclass(frozen=True)
class ExaminedRun:
    """`sound`: checkpoints that are what the journal names, by step; `later`: position of the newest of them, whose histories say how the
    run went; `possible`: what can be trained again; `not_possible`: what cannot, with why; `findings`: what speaks against the record."""

    record: RunRecord
    told: Told
    identity: RunIdentity
    sound: Mapping[int, KeptCheckpoint]
    later: TrainingPosition
    possible: tuple[Stretch, ...]
    not_possible: tuple[str, ...]
    findings: tuple[str, ...]
    columns: Columns
    journal_sha256: str
    record_sha256: str


def examine_run(folder: Path, kept: Kept) -> ExaminedRun:
    """Read everything once; nothing is trained and no checkpoint's files are read.

    Raises:
        RequestError: no such run. StoreUnavailable: its journal cannot be read. NoValidCheckpoint: nothing of it can be trained again.
    """
    record, told = record_of(folder), told_by(read_journal(folder / "journal"))
    identity, present = read_identity(folder), kept.manifests()
    foreign = {step: reasons for step, one in present.items() if (reasons := identity.foreign(one.manifest, one.manifest_sha256))}
    sound = {step: one for step, one in present.items() if step not in foreign}
    valid = [step for step, one in sound.items() if one.valid]
    if not sound or not told.commits:
        raise _nothing(folder, foreign)
    later = sound[max(sound)].manifest.position
    possible = tuple(stretch for stretch in stretches_of(told, valid) if stretch.to_step <= later.applied_steps)
    if not possible:
        raise _nothing(folder, foreign)
    unnamed = not_named(told, valid)
    return ExaminedRun(
        record=record,
        told=told,
        identity=identity,
        sound=sound,
        later=later,
        possible=possible,
        not_possible=(*out_of_reach(told, possible, later.applied_steps),
                      *(f"from the checkpoint of step {step:,}: the journal names no commit of it that counts" for step in unnamed)),
        findings=(*_against_the_record(folder), *(f"checkpoint of step {step}: {'; '.join(why)}" for step, why in foreign.items())),
        columns=read_metrics(folder / "metrics"),
        journal_sha256=_sha256(*(part for name, content in journal_files(folder / "journal") for part in (name.encode(), content))),
        record_sha256=_sha256((sealed_text(folder) or plain_text(folder) or "").encode()),
    )  # fmt: skip


def _against_the_record(folder: Path) -> tuple[str, ...]:
    damage = check_journal(folder / "journal")
    sealed, plain = sealed_text(folder), plain_text(folder)
    edited = sealed is not None and plain is not None and sealed != plain
    return (*((str(damage),) if damage else ()), *(("run.json is not what its sealed copy says",) if edited else ()))


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _nothing(folder: Path, foreign: Mapping[int, tuple[str, ...]]) -> NoValidCheckpoint:
    against = [f"step {step}: {'; '.join(why)}" for step, why in sorted(foreign.items())[:MOST_NAMED]]
    why = f"; not this run's: {'; '.join(against)}" if against else ""
    return NoValidCheckpoint(
        f"nothing of this run can be trained again: there is no proven checkpoint that its journal goes on from{why}",
        field="RUN",
        value=folder,
        remedy="Set checkpoint.keep_every_steps before a run that is to be audited; mem checkpoints list says what is there.",
    )
