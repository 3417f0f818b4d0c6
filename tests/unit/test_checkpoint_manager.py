"""The manager on a real folder with a scripted validator: commit, rotation, quarantine, takeover."""

import json
from pathlib import Path

import pytest

from mem_core.domain.checkpoint import (
    checkpoint_name,
)
from mem_core.domain.errors import InternalError, NoValidCheckpoint, RequestError, RunHeld, StoreUnavailable
from mem_core.domain.events import CheckpointRemoved
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import sha256_hex
from mem_core.testing.checkpoint_run import SHARDS, Run, draft, proven, save, stage


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "demo")


def test_every_missing_rank_file_stops_the_commit(run: Run) -> None:
    """The manifest is not published before every rank has written."""
    manager = run.attempt()
    for name in SHARDS:
        staging = stage(manager, 1)
        (staging / name).unlink()
        with pytest.raises(InternalError, match=name):
            manager.commit(1, staging, draft(1))
    assert manager.newest_valid() is None


def test_commit_refuses_links_and_foreign_folders(run: Run, tmp_path: Path) -> None:
    manager = run.attempt()
    staging = stage(manager, 1)
    (staging / "extra.pt").symlink_to("/etc/passwd")
    with pytest.raises(InternalError, match=r"extra\.pt"):
        manager.commit(1, staging, draft(1))
    with pytest.raises(InternalError, match="not a staging folder"):
        manager.commit(1, tmp_path, draft(1))


def test_commit_again_after_a_failure(run: Run) -> None:
    """A staged folder may be committed again; what an earlier try left in it does no harm."""
    manager = run.attempt()
    staging = stage(manager, 1)
    (staging / "manifest.json").write_text("of an earlier try")
    manager.commit(1, staging, draft(1))
    assert manager.validate(1).valid


def test_same_step_again_replaces_it(run: Run) -> None:
    manager = run.attempt()
    proven(manager, 1)
    manager.commit(1, stage(manager, 1, "redone"), draft(1, weights_digest="other"))
    assert [(info.state, info.weights_digest) for info in manager.listing()] == [("unvalidated", "other")]
    assert list((run.folder / "staging" / "attempt-1" / "desk").iterdir()) == []


def test_older_attempt_can_do_nothing(run: Run) -> None:
    """Fenced at every entrance, also when the lease check itself is fooled: its folder is gone, so its renames fail."""
    old = run.attempt(1)
    proven(old, 1, 2)
    staging = stage(old, 3)
    run.attempt(2).clean_staging()
    before = sorted(str(path) for path in run.folder.rglob("*"))
    with pytest.raises(RunHeld):
        old.commit(3, staging, draft(3))
    run.newest = 1  # the old one still believes that it holds the lease: it was stopped after its check
    for act in (
        lambda: old.commit(3, staging, draft(3)),
        lambda: old.new_staging(4),
        lambda: old.validate(2, "replay"),
        lambda: old.pin(1),
    ):
        with pytest.raises(RunHeld):
            act()
    (run.folder / "checkpoints" / checkpoint_name(1) / SHARDS[0]).write_text("damaged")
    with pytest.raises(RunHeld):
        old.newest_valid(recheck=True) if old.listing()[0].state != "valid" else old.rotate()
    assert [info.step for info in old.listing()] == [1, 2]
    assert [path for path in before if "pins" not in path] == sorted(str(p) for p in run.folder.rglob("*") if "pins" not in str(p))


def test_staging_of_dead_attempts_goes_and_of_this_one_stays(run: Run) -> None:
    left = stage(run.attempt(1), 1)
    manager = run.attempt(2)
    mine = stage(manager, 1)
    assert not left.exists()
    assert mine.exists()
    assert [path.name for path in (run.folder / "staging").iterdir()] == ["attempt-2"]


def test_a_commit_drops_stagings_that_it_supersedes(run: Run) -> None:
    manager = run.attempt()
    abandoned, current, later = stage(manager, 1), stage(manager, 2), stage(manager, 3)
    manager.commit(2, current, draft(2))
    assert [abandoned.exists(), later.exists()] == [False, True]
    manager.discard(later)
    assert not later.exists()


def test_other_ranks_stage_or_model_is_refused_and_kept(run: Run) -> None:
    """A sound checkpoint that does not fit the request is the request's problem: exit 64, no quarantine."""
    proven(run.attempt(1), 1)
    for expectation, named in (
        ({"num_ranks": 1}, "2 ranks"),
        ({"zero_stage": 1}, "ZeRO stage 2"),
        ({"parameters": {"w": (3,)}}, r"parameter w has shape \[2\]"),
        ({"parameters": {"v": (2,)}}, "parameter v is only in the model"),
    ):
        with pytest.raises(RequestError, match=named):
            run.attempt(run.newest + 1, expectation=expectation).newest_valid()
    assert [info.state for info in run.attempt(run.newest + 1).listing()] == ["valid"]


def test_rotation_keeps_what_was_asked(run: Run) -> None:
    manager = run.attempt(section={"keep_last": 2, "keep_every_steps": 3})
    proven(manager, 1, 2, 3, 4, 5)
    manager.pin(1)
    save(manager, 6)
    plan = manager.rotate()
    assert plan.remove == (2,)
    assert [info.step for info in manager.listing()] == [1, 3, 4, 5, 6]
    manager.unpin(1)
    assert manager.rotate().remove == (1,)
    assert [event.step for event in run.seen(CheckpointRemoved)] == [2, 1]


def test_nothing_is_rotated_before_something_is_validated(run: Run) -> None:
    manager = run.attempt(section={"keep_last": 1})
    for step in (1, 2, 3):
        save(manager, step)
    assert manager.rotate().remove == ()


def test_quarantine_is_bounded_and_never_empty(run: Run) -> None:
    manager = run.attempt()
    for step in range(1, 7):
        save(manager, step, weights_digest=f"bad-{step}")
        assert not manager.validate(step).valid
    assert [info.step for info in manager.listing() if info.state == "quarantined"] == [4, 5, 6]


class FullDisk(OsDisk):
    """Says how much is free as told."""

    def __init__(self, free_bytes: int) -> None:
        self.free = free_bytes

    def free_bytes(self, path: Path) -> int:
        return self.free


def test_too_little_space_is_refused_with_numbers_before_the_save(run: Run) -> None:
    disk = FullDisk(10 << 30)
    manager = run.attempt(disk=disk)
    proven(manager, 1)
    disk.free = 5 << 20
    with pytest.raises(StoreUnavailable, match=r"5\.0 MiB free.*at least 121\.0 MiB free"):
        manager.new_staging(2, expected_bytes=100 << 20)
    disk.free = 10 << 30
    proven(manager, 2)


def test_signature_is_demanded_when_there_is_a_key(run: Run) -> None:
    proven(run.attempt(1, signature_key=b"right"), 1)
    assert run.attempt(2, signature_key=b"right").newest_valid() is not None
    with pytest.raises(NoValidCheckpoint, match="signature"):
        run.attempt(3, signature_key=b"wrong").newest_valid()


def test_close_leaves_no_staging_and_may_be_followed_by_more(run: Run) -> None:
    manager = run.attempt()
    proven(manager, 1)
    stage(manager, 2)
    manager.close()
    assert list((run.folder / "staging").iterdir()) == []
    proven(manager, 2)


@pytest.mark.parametrize("name", ["../escape.pt", "/etc/passwd", "a/../../escape.pt", "manifest.json", "..\\escape.pt", "a\0b"])
def test_manifest_that_points_out_of_its_folder_is_refused(run: Run, name: str) -> None:
    """Re-signed with a right digest of its own: the names themselves are what is refused."""
    manager = run.attempt()
    save(manager, 1)
    path = manager.path_of(1) / "manifest.json"
    body = json.loads(path.read_bytes())
    body["files"][0]["path"] = name
    body["manifest_sha256"] = ""
    body["manifest_sha256"] = sha256_hex(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    verdict = manager.validate(1)
    assert not verdict.valid
    assert "inside the checkpoint folder" in verdict.reasons[0]


def test_what_plain_json_cannot_say_is_refused_at_commit(run: Run) -> None:
    manager = run.attempt()
    for extra in ({"loss": float("nan")}, {"path": object()}):
        with pytest.raises(InternalError, match="plain JSON"):
            save(manager, 1, extra=extra)
