"""The manager on a real folder with a scripted validator: commit, verdict, fall-back, rotation, takeover."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.domain.checkpoint import (
    CheckpointDraft,
    CheckpointExpectation,
    CheckpointManifest,
    CheckpointVerdict,
    TrainingPosition,
    checkpoint_name,
)
from mem_core.domain.errors import InternalError, NoValidCheckpoint, RequestError, RunHeld, StoreUnavailable
from mem_core.domain.events import CheckpointCommitted, CheckpointJudged, CheckpointRemoved, Event, Noted
from mem_core.domain.request import CheckpointSection
from mem_core.infrastructure.storage.disk import OsDisk
from mem_core.runtime.checkpoint_manager import CheckpointManager
from mem_core.runtime.checkpoint_manager.file_checks import check_files
from mem_core.runtime.checkpoint_manager.manifest_codec import encode_manifest, sha256_hex

SHARDS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")


def judge_bytes(folder: Path, manifest: CheckpointManifest, previous: str, level: Any) -> CheckpointVerdict:
    """A validator that judges sizes and digests, not tensors; `bad` in the weights digest means not finite."""
    reasons = check_files(OsDisk(), folder, manifest)
    if manifest.weights_digest.startswith("bad"):
        reasons = (*reasons, "not finite")
    digest = sha256_hex(encode_manifest(manifest))
    return CheckpointVerdict(step=manifest.step, level=level, valid=not reasons, reasons=reasons, weights_bad=False, manifest_sha256=digest)


class Run:
    """One run folder and its attempts; `newest` plays the lease."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest = 0
        self.events: list[Event] = []

    def attempt(self, number: int = 1, *, validator: Callable[..., CheckpointVerdict] = judge_bytes, **options: Any) -> CheckpointManager:
        self.newest = max(self.newest, number)

        def fence() -> None:
            if number < self.newest:
                raise RunHeld("held", remedy="Wait.")

        settings: dict[str, Any] = {"num_ranks": 2, "zero_stage": 2, "parameters": {"w": (2,)}}
        settings |= options.pop("expectation", {})
        section = CheckpointSection(**options.pop("section", {}))
        options.setdefault("scan", lambda path: ())
        return CheckpointManager(
            self.folder, "demo", number, section, CheckpointExpectation(**settings),
            fence=fence, emit=self.events.append, validator=validator, **options,
        )  # fmt: skip

    def seen(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "demo")


def stage(manager: CheckpointManager, step: int, content: str = "") -> Path:
    staging = manager.new_staging(step)
    for name in SHARDS:
        (staging / name).write_text(f"{name} of step {step} {content}")
    return staging


def draft(step: int, **fields: Any) -> CheckpointDraft:
    fields.setdefault("weights_digest", f"digest-{step}")
    return CheckpointDraft(position=TrainingPosition(applied_steps=step, batch_index=step), **fields)


def save(manager: CheckpointManager, step: int, **fields: Any) -> CheckpointManifest:
    return manager.commit(step, stage(manager, step), draft(step, **fields))


def proven(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        save(manager, step)
        assert manager.validate(step).valid


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
    other = CheckpointManager(
        run.folder, "other", 1, CheckpointSection(), CheckpointExpectation(num_ranks=2, zero_stage=2),
        fence=lambda: None, emit=lambda event: None, validator=judge_bytes,
    )  # fmt: skip
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
