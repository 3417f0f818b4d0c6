"""Who a run is, read from its folder: what its checkpoints are held against by whoever looks from outside. Reads only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mem_core.core.run.belonging import CheckpointWords, belonging_of, birth_of
from mem_core.core.run.record import read_record
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import CheckpointManifest
from mem_core.domain.errors import NoValidCheckpoint


@dataclass(frozen=True)
class RunIdentity:
    """Birth (empty where no record says it) and journal of a run."""

    run_id: str
    birth: Mapping[str, Any] = field(default_factory=dict[str, Any])
    words: CheckpointWords = field(default_factory=CheckpointWords)

    def foreign(self, manifest: CheckpointManifest, manifest_sha256: str) -> tuple[str, ...]:
        """Why a checkpoint is not this run's; empty where it is, as far as can be told."""
        if manifest.run_id != self.run_id:
            return (f"it belongs to run {manifest.run_id}",)
        return belonging_of(manifest, manifest_sha256, self.birth, self.words).foreign


def read_identity(folder: Path) -> RunIdentity:
    """Of the run in `folder`; a record or a journal that is lost or damaged leaves what it would have said open."""
    words = CheckpointWords(line.event for line in read_journal(folder / "journal"))
    try:
        record = read_record(folder)
    except NoValidCheckpoint:
        record = None
    if record is None:
        return RunIdentity(folder.resolve().name, {}, words)
    return RunIdentity(record.run_id, birth_of(record), words)
