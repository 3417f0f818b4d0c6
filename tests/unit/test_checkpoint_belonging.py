"""A checkpoint proves its bytes; whose it is, its birth and the journal say. What is another run's is never used and never deleted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.belonging import Belonging, CheckpointWords, belonging_of, birth_differences, birth_of
from mem_core.core.run.record import RunRecord
from mem_core.domain.checkpoint import CheckpointManifest, CheckpointVerdict, checkpoint_name
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.domain.events import CheckpointCommitted, CheckpointJudged, CheckpointRemoved, CheckpointSealed, Noted
from mem_core.domain.plan import MemoryPlan
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import ForeignCheckpoint, decode_manifest, encode_manifest
from mem_core.testing.checkpoint_run import SHARDS, Run, draft, proven, save, stage

OURS = {"training.seed": 0, "training.learning_rate": 0.001, "data": "d" * 64, "model": "m"}
THEIRS = OURS | {"training.seed": 7}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "demo")


def record(**sections: Any) -> RunRecord:
    request = RuntimeRequest.model_validate({"run_id": "demo", **sections})
    plan = MemoryPlan(micro_batch_rows=1)
    return RunRecord(
        run_id="demo", request=request, device="cpu", dtype="float32", default_plan=plan, data_fingerprint="d", model_fingerprint="m"
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"training": {"seed": 1}}, "training.seed 0 there and 1 here"),
        ({"training": {"learning_rate": 0.5}}, "training.learning_rate"),
        ({"data": {"sequence_length": 64}}, "data.sequence_length"),
        ({"deepspeed": {"wall_clock_breakdown": True}}, "deepspeed"),
        ({"model": {"compile": "on"}}, "model.compile"),
    ],
)
def test_what_decides_the_weights_is_part_of_the_birth(changed: dict[str, Any], named: str) -> None:
    (difference,) = birth_differences(birth_of(record(**changed)), birth_of(record()))
    assert named in difference


@pytest.mark.parametrize(
    "changed",
    [
        {"training": {"max_steps": 77, "segment_steps": 3}},
        {"checkpoint": {"keep_last": 9, "mirror": "s3://bucket/runs"}},
        {"parallel": {"num_ranks": 2, "zero_stage": 3}},
        {"data": {"train": ["elsewhere/*.txt"]}},
        {"store": "/elsewhere"},
    ],
)
def test_what_may_change_and_where_things_lie_is_not(changed: dict[str, Any]) -> None:
    """Files are known by what is in them, and a shape may be converted."""
    assert birth_differences(birth_of(record(**changed)), birth_of(record())) == ()


def test_a_value_that_only_a_newer_version_knows_says_nothing() -> None:
    newer = OURS | {"training.new_field": 3, "model.lora": {"rank": 8, "new": 1}}
    older = OURS | {"model.lora": {"rank": 8}}
    assert birth_differences(newer, older) == ()
    assert birth_differences(newer, older | {"model.lora": None}) == ("model.lora None there and {'rank': 8, 'new': 1} here",)


def manifest(step: int = 60, birth: dict[str, Any] | None = None, weights: str = "w60", data: str = "d" * 64) -> CheckpointManifest:
    position = {"applied_steps": step, "batch_index": step, "trajectory_digest": f"t{step}"}
    files = [{"path": "model.pt", "size_bytes": 1, "sha256": "0" * 64}]
    return CheckpointManifest.model_validate(
        {"run_id": "demo", "attempt": 1, "step": step, "num_ranks": 1, "zero_stage": 1, "position": position, "weights_digest": weights,
         "data_fingerprint": data, "files": files, "birth": birth or {}}
    )  # fmt: skip


def committed(weights: str = "w60", sha256: str = "") -> CheckpointCommitted:
    return CheckpointCommitted(
        step=60, size_bytes=1, duration_s=0.1, weights_digest=weights, trajectory_digest="t60", manifest_sha256=sha256
    )


def sealed(sha256: str, weights: str = "w60") -> CheckpointSealed:
    return CheckpointSealed(step=60, manifest_sha256=sha256, weights_digest=weights, trajectory_digest="t60")


def condemned() -> CheckpointJudged:
    return CheckpointJudged(verdict=CheckpointVerdict(step=60, level="integrity", valid=False, manifest_sha256="x"))


@pytest.mark.parametrize(
    ("said", "found", "foreign", "unheld"),
    [
        pytest.param([committed()], manifest(), "", "", id="an old one as the journal says"),
        pytest.param([committed("other")], manifest(), "the journal names weights other", "", id="an old one with other weights"),
        pytest.param([committed()], manifest(birth=OURS), "", "", id="a new one as an old journal says"),
        pytest.param([committed(sha256="s")], manifest(birth=OURS), "", "", id="a new one, the very manifest"),
        pytest.param([committed(sha256="z")], manifest(birth=OURS), "it was changed since", "", id="digests hold, the bytes are others"),
        pytest.param([committed(sha256="s")], manifest(birth=THEIRS), "training.seed 7 there and 0 here", "", id="born otherwise"),
        pytest.param([committed("a", "a"), sealed("s")], manifest(birth=OURS), "", "", id="a crash after it took its place"),
        pytest.param([committed(), sealed("z", "b")], manifest(), "", "", id="a crash before it took its place"),
        pytest.param([sealed("a"), committed(sha256="b")], manifest(birth=OURS), "changed since", "", id="committed withdraws what was"),
        pytest.param([committed("x"), condemned()], manifest(birth=OURS), "", "", id="what was condemned binds nothing"),
        pytest.param([committed("x"), CheckpointRemoved(step=60, reason="")], manifest(birth=OURS), "", "", id="nor what was removed"),
        pytest.param([], manifest(birth=OURS), "", "values it was born with agree", id="no journal, the same birth"),
        pytest.param([], manifest(birth=THEIRS), "training.seed", "", id="no journal, another birth"),
        pytest.param([], manifest(), "", "only the fingerprint of the data agrees", id="no journal, an old one"),
        pytest.param([], manifest(data="e" * 64), "its data is eeee", "", id="no journal, an old one of other data"),
    ],
)  # fmt: skip
def test_whose_a_checkpoint_is(said: list[Any], found: CheckpointManifest, foreign: str, unheld: str) -> None:
    belonging = belonging_of(found, "s", OURS, CheckpointWords(said))
    assert foreign in "; ".join(belonging.foreign)
    assert unheld in belonging.unheld
    if not foreign and not unheld:
        assert belonging == Belonging()


def put_in_place(run: Run, tmp_path: Path, step: int, birth: dict[str, Any], weights: str = "theirs") -> None:
    """A checkpoint of another run with the same run id, proven there, copied over ours: a store synced from elsewhere does that."""
    other = Run(tmp_path / "elsewhere" / "demo")
    manager = other.attempt(birth=birth)
    save(manager, step, weights_digest=weights)
    assert manager.validate(step).valid
    target = run.folder / "checkpoints" / checkpoint_name(step)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(manager.path_of(step), target)
    shutil.rmtree(other.folder)


@pytest.mark.parametrize(("ours", "theirs"), [(OURS, THEIRS), ({}, {})], ids=["by birth", "by the journal alone"])
def test_a_stranger_in_the_newest_place_is_set_aside_whole(run: Run, tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    proven(run.attempt(birth=ours), 50, 60)
    put_in_place(run, tmp_path, 60, theirs)
    manager = run.attempt(2, birth=ours)
    newest = manager.newest_valid()
    assert newest is not None
    assert newest.step == 50
    (kept,) = (run.folder / "quarantine").iterdir()
    assert kept.name == "kept-1-step-000000060"
    assert json.loads((kept / "verdict.json").read_bytes())["valid"], "it is good where it belongs"
    assert [(info.step, info.state) for info in manager.listing()] == [(50, "valid"), (60, "quarantined")]
    assert len(run.told) == 1
    assert "step 60 is not this run's" in run.told[0]
    assert run.attempt(3, birth=ours).newest_valid() == newest
    assert len(run.told) == 1, "said once"


def test_a_stranger_below_the_newest_is_never_rotated_away(run: Run, tmp_path: Path) -> None:
    proven(run.attempt(birth=OURS), 50, 60)
    put_in_place(run, tmp_path, 50, THEIRS)
    manager = run.attempt(2, birth=OURS, section={"keep_last": 1})
    assert manager.newest_valid() is not None
    proven(manager, 70, 80)
    assert manager.rotate().remove == (60, 70)
    assert [path.name for path in (run.folder / "quarantine").iterdir()] == ["kept-1-step-000000050"]


def test_strangers_are_not_trimmed_as_damage_is(run: Run, tmp_path: Path) -> None:
    proven(run.attempt(birth=OURS), 10)
    for step in range(20, 70, 10):
        put_in_place(run, tmp_path, step, THEIRS)
    manager = run.attempt(2, birth=OURS)
    manager.set_strangers_aside()
    for step in (71, 72, 73, 74, 75):
        save(manager, step, weights_digest="bad")
        assert not manager.validate(step).valid
    names = [path.name.split("-")[0] for path in (run.folder / "quarantine").iterdir()]
    assert (names.count("kept"), names.count("q")) == (5, 3)


def test_an_edited_manifest_with_consistent_hashes_is_not_the_one_that_was_journaled(run: Run) -> None:
    """No key, every hash right, and still not believed: the journal names the manifest itself."""
    manager = run.attempt(birth=OURS)
    proven(manager, 1, 2)
    path = manager.path_of(2) / "manifest.json"
    before = decode_manifest(path.read_bytes())
    path.write_bytes(encode_manifest(before.model_copy(update={"position": before.position.model_copy(update={"tokens": 1})})))
    newest = run.attempt(2, birth=OURS).newest_valid()
    assert newest is not None
    assert newest.step == 1
    assert "it was changed since" in run.told[0]


def test_checkpoints_of_an_older_version_go_on_and_nothing_is_said(run: Run) -> None:
    """No birth in them, no manifest's digest in the journal: its digests decide, and they agree."""
    proven(run.attempt(), 1, 2)
    old = [event.model_copy(update={"manifest_sha256": ""}) for event in run.seen(CheckpointCommitted)]
    run.words = CheckpointWords(old)
    newest = run.attempt(2, birth=OURS).newest_valid()
    assert newest is not None
    assert newest.step == 2
    assert run.told == []


def test_what_nobody_can_tell_is_said(run: Run) -> None:
    proven(run.attempt(), 1)
    run.words = CheckpointWords()
    manager = run.attempt(2, birth=OURS)
    assert manager.newest_valid() is not None
    assert manager.newest_valid() is not None
    assert ["could not be held against this run's journal" in text for text in run.told] == [True]
    assert any("could not be held" in event.text for event in run.seen(Noted))


def test_a_step_where_another_run_s_checkpoint_lies_is_saved_beside_it(run: Run) -> None:
    """`run_id` other: left alone for as long as it can be, and moved out of the way instead of deleted when its place is needed."""
    manager = run.attempt(birth=OURS)
    proven(manager, 1)
    folder = run.folder / "checkpoints" / checkpoint_name(2)
    shutil.copytree(manager.path_of(1), folder)
    other = decode_manifest((folder / "manifest.json").read_bytes()).model_copy(update={"run_id": "other", "step": 2})
    (folder / "manifest.json").write_bytes(encode_manifest(other))
    proven(manager, 2)
    (kept,) = (run.folder / "quarantine").iterdir()
    assert decode_manifest((kept / "manifest.json").read_bytes()).run_id == "other"


def test_what_comes_from_a_mirror_is_held_against_birth_and_digests(run: Run, tmp_path: Path) -> None:
    """Its bytes may be another machine's; its weights may not."""
    proven(run.attempt(birth=OURS), 1, 2)
    there = run.folder / "checkpoints" / checkpoint_name(2)
    copy = tmp_path / "copy"
    shutil.copytree(there, copy, ignore=shutil.ignore_patterns("verdict.json"))
    before = decode_manifest((copy / "manifest.json").read_bytes())
    shutil.rmtree(there)
    for changes, accepted in (({"attempt": 9}, True), ({"weights_digest": "z"}, False), ({"birth": THEIRS}, False)):
        manager = run.attempt(2, birth=OURS)
        staging = manager.new_staging(2)
        for name in SHARDS:
            shutil.copy(copy / name, staging / name)
        (staging / "manifest.json").write_bytes(encode_manifest(before.model_copy(update=changes)))
        if accepted:
            manager.adopt(2, staging)
            assert manager.validate(2).valid
        else:
            with pytest.raises(ForeignCheckpoint):
                manager.adopt(2, staging)
            assert not staging.exists()


def test_all_foreign_is_none_valid(run: Run, tmp_path: Path) -> None:
    proven(run.attempt(birth=OURS), 60)
    put_in_place(run, tmp_path, 60, THEIRS)
    with pytest.raises(NoValidCheckpoint, match=r"step 60.*training\.seed 7 there and 0 here"):
        run.attempt(2, birth=OURS).newest_valid()


def test_a_commit_names_its_manifest_before_and_after(run: Run) -> None:
    manager = run.attempt(birth=OURS)
    manager.commit(5, stage(manager, 5), draft(5))
    (before,), (after,) = run.seen(CheckpointSealed), run.seen(CheckpointCommitted)
    assert before.manifest_sha256 == after.manifest_sha256 != ""
    assert run.events.index(before) < run.events.index(after)
