"""Which checkpoint a run resumes from: the newest that was proven and still holds, never a half, foreign or damaged one."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.checkpoint import (
    CheckpointExpectation,
    CheckpointManifest,
    CheckpointVerdict,
    checkpoint_name,
)
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.domain.events import CheckpointCommitted, CheckpointJudged, Noted
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.ports import CheckpointScope
from mem_core.testing.checkpoint_run import SHARDS, Run, judge_bytes, manager_of, proven, save, stage


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "demo")


def test_nothing_yet_is_none_and_said(run: Run) -> None:
    """No checkpoint: start at 0, with a line that says so."""
    assert run.attempt().newest_valid() is None
    assert "starts at step 0" in run.seen(Noted)[-1].text


def test_commit_then_resume_gives_the_committed_manifest(run: Run) -> None:
    manager = run.attempt()
    written = save(manager, 10, extra={"next": [1, 2.5, None]})
    assert run.attempt(2).newest_valid() == written
    assert sorted(entry.path for entry in written.files) == sorted(SHARDS)
    assert run.seen(CheckpointCommitted)[0].size_bytes == sum(len(f"{name} of step 10 ") for name in SHARDS)
    assert [event.verdict.valid for event in run.seen(CheckpointJudged)] == [True]


def test_folders_that_are_removed_under_a_live_run_are_made_again(run: Run) -> None:
    """The engine is sound: the next save is a resume point, and a bad one still has a place to go."""
    manager = run.attempt()
    save(manager, 10)
    for name in ("checkpoints", "quarantine"):
        shutil.rmtree(run.folder / name)
    written = save(manager, 20)
    assert manager.newest_valid() == written
    (manager.path_of(20) / SHARDS[0]).write_bytes(b"")
    with pytest.raises(NoValidCheckpoint):
        manager.newest_valid()
    assert [path.name for path in (run.folder / "quarantine").iterdir()] == ["q-1-step-000000020"]


def test_constructing_touches_nothing(run: Run) -> None:
    run.attempt()
    assert not run.folder.exists()


def test_walks_from_newest_to_oldest_by_number(run: Run) -> None:
    """Names of more than nine digits sort wrongly as text: 10^9 must beat 999,999,999."""
    manager = run.attempt()
    proven(manager, 999_999_999, 1_000_000_000)
    newest = manager.newest_valid()
    assert newest is not None
    assert newest.step == 1_000_000_000


def test_falls_back_over_bad_ones_and_never_tries_them_again(run: Run) -> None:
    manager = run.attempt()
    proven(manager, 1, 2)
    save(manager, 3)
    (manager.path_of(3) / SHARDS[0]).write_bytes(b"")
    damaged = manager.path_of(2) / SHARDS[1]
    damaged.write_bytes(b"X" + damaged.read_bytes()[1:])
    again = run.attempt(2)
    newest = again.newest_valid()
    assert newest is not None
    assert newest.step == 1
    assert [(info.step, info.state) for info in again.listing()] == [(1, "valid"), (2, "quarantined"), (3, "quarantined")]
    skips = [event.text for event in run.seen(Noted) if "skipped" in event.text]
    assert ["step 3" in skips[0], "0 bytes" in skips[0], "step 2" in skips[1], "SHA-256 differs" in skips[1]] == [True] * 4
    run.events.clear()
    assert run.attempt(3).newest_valid() == newest
    assert run.seen(Noted) == []


def test_some_exist_none_valid_is_an_error_for_ever(run: Run) -> None:
    """Exit 74, also on the next start when everything is already in quarantine; never a silent start at 0."""
    manager = run.attempt()
    save(manager, 1)
    (manager.path_of(1) / SHARDS[2]).unlink()
    for number in (2, 3):
        with pytest.raises(NoValidCheckpoint, match=r"step 1.*missing"):
            run.attempt(number).newest_valid()


@pytest.mark.parametrize("half", ["empty", "files", "staging", "link"])
def test_half_folders_never_count(run: Run, half: str, tmp_path: Path) -> None:
    """An empty or half-written folder is no checkpoint: it neither resumes nor makes "none valid"."""
    manager = run.attempt()
    manager.clean_staging()
    target = run.folder / "checkpoints" / checkpoint_name(9)
    if half == "staging":
        stage(manager, 9)
    elif half == "link":
        target.symlink_to(tmp_path)
    else:
        target.mkdir()
        if half == "files":
            (target / SHARDS[0]).write_text("half")
    assert run.attempt(2).newest_valid() is None


def test_a_half_folder_gives_way_to_a_commit(run: Run) -> None:
    manager = run.attempt()
    manager.clean_staging()
    (run.folder / "checkpoints" / checkpoint_name(4)).mkdir()
    save(manager, 4)
    assert manager.validate(4).valid


def test_lost_manifest_of_a_judged_checkpoint_counts_as_damage(run: Run) -> None:
    manager = run.attempt()
    proven(manager, 1)
    (manager.path_of(1) / "manifest.json").unlink()
    with pytest.raises(NoValidCheckpoint):
        run.attempt(2).newest_valid()


def test_foreign_checkpoint_is_neither_used_nor_touched(run: Run, tmp_path: Path) -> None:
    scope = CheckpointScope(run.folder, "other", 1, CheckpointSection(), CheckpointExpectation(num_ranks=2, zero_stage=2))
    other = manager_of(scope, judge_bytes)
    save(other, 5)
    manager = run.attempt(2, section={"keep_last": 1})
    with pytest.raises(NoValidCheckpoint, match="belongs to run other"):
        manager.newest_valid()
    proven(manager, 6, 7)
    manager.rotate()
    assert [(info.step, info.state) for info in manager.listing()] == [(5, "unvalidated"), (7, "valid")]


def test_verdict_is_given_once(run: Run) -> None:
    calls: list[int] = []

    def count(*arguments: Any) -> CheckpointVerdict:
        calls.append(1)
        return judge_bytes(*arguments)

    manager = run.attempt(validator=count)
    save(manager, 1)
    assert manager.validate(1) == manager.validate(1)
    run.attempt(2, validator=count).newest_valid()
    assert len(calls) == 1


def test_verdict_of_another_manifest_is_void(run: Run) -> None:
    """A verdict copied from a good checkpoint to another one proves nothing about it."""
    manager = run.attempt()
    proven(manager, 1)
    save(manager, 2)
    (manager.path_of(2) / "verdict.json").write_bytes((manager.path_of(1) / "verdict.json").read_bytes())
    (manager.path_of(2) / SHARDS[0]).write_text("damaged")
    newest = run.attempt(2).newest_valid()
    assert newest is not None
    assert newest.step == 1


def test_a_validator_that_dies_leaves_no_verdict(run: Run) -> None:
    def dies(*arguments: Any) -> CheckpointVerdict:
        raise MemoryError("killed")

    manager = run.attempt(validator=dies)
    save(manager, 1)
    with pytest.raises(MemoryError):
        manager.validate(1)
    assert [info.state for info in run.attempt(2).listing()] == ["unvalidated"]
    assert run.attempt(3).newest_valid() is not None


def test_validator_gets_the_digest_of_the_validated_one_before(run: Run) -> None:
    seen: list[str] = []

    def record(folder: Path, manifest: CheckpointManifest, previous: str, level: Any) -> CheckpointVerdict:
        seen.append(previous)
        return judge_bytes(folder, manifest, previous, level)

    manager = run.attempt(validator=record, initial_weights_digest="untrained")
    for step in (1, 2, 3):
        save(manager, step)
    manager.validate(1)
    manager.validate(3)
    assert seen == ["untrained", "digest-1"]


class Unreadable(OsDisk):
    """A disk that says no to one file, as to a user without permission, or a bad sector."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number

    def read(self, path: Path) -> bytes:
        self._refuse(path)
        return super().read(path)

    def digest(self, path: Path) -> tuple[int, str]:
        self._refuse(path)
        return super().digest(path)

    def _refuse(self, path: Path) -> None:
        if path == self.path:
            raise OSError(self.number, os.strerror(self.number), str(path))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", [SHARDS[1], "manifest.json", "verdict.json"])
def test_a_newest_checkpoint_that_cannot_be_read_gives_way_to_an_older_one_and_stays(run: Run, name: str, number: int) -> None:
    """It may be the best there is for whoever can read it; the run goes on from what can be read, and saves over it."""
    manager = run.attempt()
    proven(manager, 10, 20)
    disk = Unreadable(manager.path_of(20) / name, number)
    again = run.attempt(2, disk=disk)
    found = again.newest_valid()
    assert found is not None
    if name == "verdict.json":
        assert found.step == 20, "a verdict that cannot be read is none, and another is given"
        return
    assert found.step == 10
    assert os.strerror(number) in run.seen(Noted)[-1].text
    assert (manager.path_of(20) / name).is_file()
    assert not (run.folder / "quarantine").exists() or not list((run.folder / "quarantine").iterdir())
    states = {info.step: info.state for info in again.listing()}
    assert states[10] == "valid"
    disk.path = Path("/nowhere")
    save(again, 20)
    assert again.newest_valid() is not None


def test_nothing_that_can_be_read_is_told_as_such(run: Run) -> None:
    manager = run.attempt()
    proven(manager, 10)
    with pytest.raises(NoValidCheckpoint, match="cannot be read"):
        run.attempt(2, disk=Unreadable(manager.path_of(10) / SHARDS[0], errno.EACCES)).newest_valid()
