"""Where a run goes on: proven checkpoints only, and never a silent start at 0."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mem_core.domain.checkpoint import TrainingPosition
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.runtime.session.checkpoint_service import CheckpointService, ResumePoint, resume_position

FRESH = TrainingPosition(applied_steps=0, batch_index=0)


class Manager:
    """Answers `newest_valid` as told and keeps the notes."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.notes: list[str] = []

    def newest_valid(self, *, leave_out: Any = ()) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def note(self, text: str) -> None:
        self.notes.append(text)

    def path_of(self, step: int) -> Path:
        return Path(f"step-{step}")


def test_nothing_yet_starts_at_zero() -> None:
    """No checkpoint at all."""
    assert resume_position(Manager(None), FRESH, lambda: False) == ResumePoint(None, FRESH)  # type: ignore[arg-type]


def test_a_run_that_lost_every_proven_checkpoint_ends() -> None:
    """Some were proven, none is valid now: exit 74."""
    with pytest.raises(NoValidCheckpoint):
        resume_position(Manager(NoValidCheckpoint("none", remedy="r")), FRESH, lambda: True)  # type: ignore[arg-type]


def test_a_run_whose_checkpoints_folder_is_gone_ends_too() -> None:
    """Proven once, and now nothing lies there: as much lost as if each were damaged, so not a start at 0 either."""
    with pytest.raises(NoValidCheckpoint, match="none lies in its checkpoints folder"):
        resume_position(Manager(None), FRESH, lambda: True)  # type: ignore[arg-type]


def test_a_first_checkpoint_damaged_before_it_was_proven_is_redone_aloud() -> None:
    """Nothing was ever proven: start at 0 with a line that says so."""
    manager = Manager(NoValidCheckpoint("step 10: bit flip", remedy="r"))
    assert resume_position(manager, FRESH, lambda: False) == ResumePoint(None, FRESH)  # type: ignore[arg-type]
    assert "ever proven" in manager.notes[0]
    assert "bit flip" in manager.notes[0]


def test_the_mirror_is_asked_before_a_run_that_lost_everything_here_ends(tmp_path: Path) -> None:
    """All copies of this disk are bad and the mirror has one: it is used, and the line says why; with no mirror the run ends."""
    manager = Manager(NoValidCheckpoint("step 20: bit flip", remedy="r"))

    def bring_back() -> bool:
        manager.answer = SimpleNamespace(step=10, position=TrainingPosition(applied_steps=10, batch_index=10), weights_digest="w")
        return True

    alone = CheckpointService(manager, tmp_path, 0)  # type: ignore[arg-type]
    with pytest.raises(NoValidCheckpoint):
        alone.resume(FRESH, lambda: True)
    mirrored = CheckpointService(manager, tmp_path, 0, bring_back=bring_back)  # type: ignore[arg-type]
    point = mirrored.resume(FRESH, lambda: True)
    assert (point.folder, point.position.applied_steps) == (Path("step-10"), 10)
    assert "bit flip" in manager.notes[-1]
