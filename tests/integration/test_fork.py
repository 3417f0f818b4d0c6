"""A fork goes on with the whole state of its origin: with nothing changed it ends as the origin did, to the bit."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flows.commands.branches.fork import ForkWish, fork_run
from flows.commands.report import run_status_text
from mem_core.core.run.record import record_of
from mem_core.core.run.state_manager import read_journal
from mem_core.core.run.story import event_words
from mem_core.domain.errors import NoValidCheckpoint, RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.request.file import load_request
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.metrics import read_metrics

pytestmark = pytest.mark.integration
Nano = Callable[..., RuntimeRequest]
Drive = Callable[..., RunResult]
TRAINING = {"max_steps": 24, "segment_steps": 6, "warmup_steps": 4, "learning_rate": 1e-3, "global_batch_size": 4}
KEEP = {"keep_last": 9}


def fork(root: Path, run: str, new_id: str, *changes: str) -> RuntimeRequest:
    """Fork, and the request that the fork was written with."""
    assert fork_run(ForkWish(run, new_id, str(root), changes), as_json=False) == 0
    return load_request(str(root / new_id / "request.yaml"))


def digests(result: RunResult) -> tuple[str, str, int]:
    assert result.status == "completed"
    return result.weights_digest, result.trajectory_digest, result.tokens


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2, 3))])
def test_with_nothing_changed_it_ends_with_the_digests_of_its_origin(drive: Drive, nano: Nano, tmp_path: Path, stage: int) -> None:
    """From an early step, from the newest, and from a fork of a fork."""
    held_out = {"every_steps": 12}
    origin = drive(nano("origin", training=TRAINING, checkpoint=KEEP, parallel={"zero_stage": stage}, evaluation=held_out))
    first = drive(fork(tmp_path, "origin@6", "first"))
    again = drive(fork(tmp_path, "first@12", "again"))
    ended = drive(fork(tmp_path, "origin", "ended"))
    assert digests(first) == digests(again) == digests(ended) == digests(origin)
    assert first.validation_loss == origin.validation_loss
    assert first.forked_from is not None
    assert (first.forked_from.run_id, first.forked_from.step, first.forked_from.changed) == ("origin", 6, ())
    assert again.forked_from is not None
    assert again.forked_from.run_id == "first"
    assert (read_metrics(tmp_path / "again/metrics")["loss"] == read_metrics(tmp_path / "origin/metrics")["loss"]).all()


def test_what_is_changed_takes_effect_from_there_on_and_not_before(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Also what the saved state of the optimizer carries: weight decay, betas, eps."""
    origin = drive(nano("origin", training=TRAINING, checkpoint=KEEP))
    ends = {}
    for number, change in enumerate(
        ("training.learning_rate=2e-3", "training.weight_decay=5", "training.betas=[0.5, 0.6]", "training.eps=1e-3",
         "training.max_steps=30")
    ):  # fmt: skip
        ends[change] = drive(fork(tmp_path, "origin@12", f"fork-{number}", change))
        loss = read_metrics(tmp_path / f"fork-{number}" / "metrics")["loss"]
        assert (loss[:12] == read_metrics(tmp_path / "origin/metrics")["loss"][:12]).all()
    assert len({result.weights_digest for result in (origin, *ends.values())}) == len(ends) + 1, "one of them changed nothing"
    assert ends["training.max_steps=30"].applied_steps == 30
    assert record_of(tmp_path / "fork-4").request.training.schedule_steps == 24


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2))])
def test_a_changed_weight_decay_takes_effect_at_every_stage(drive: Drive, nano: Nano, tmp_path: Path, stage: int) -> None:
    origin = drive(nano("origin", training={**TRAINING, "max_steps": 12}, checkpoint=KEEP, parallel={"zero_stage": stage}))
    heavy = drive(fork(tmp_path, "origin@6", "heavy", "training.weight_decay=5"))
    assert heavy.weights_digest != origin.weights_digest


def test_status_story_report_and_record_name_the_origin(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    origin = drive(nano("origin", training={**TRAINING, "max_steps": 12}, checkpoint=KEEP, evaluation={"every_steps": 6}))
    fork(tmp_path, "origin@best", "best")
    best = record_of(tmp_path / "best").origin
    assert origin.best is not None
    assert best is not None
    assert best.step == origin.best.step
    request = fork(tmp_path, "origin@6", "branch", "training.learning_rate=2e-3")
    folder = tmp_path / "branch"
    words = "forked from origin at step 6"
    assert "origin at step 6: training.learning_rate 0.001 -> 0.002" in run_status_text(folder)
    story = [text for line in read_journal(folder / "journal") if (text := event_words(line.event))]
    assert any(text.startswith(words) for text in story)
    drive(request)
    assert f"F{words[1:]}" in (folder / "report.html").read_text()
    came = json.loads((folder / "run.json").read_text())["origin"]
    manifest = json.loads((tmp_path / "origin/checkpoints/step-000000006/manifest.json").read_text())
    assert (came["run_id"], came["step"], came["weights_digest"]) == ("origin", 6, manifest["weights_digest"])
    assert len(came["manifest_sha256"]) == 64


def test_a_damaged_checkpoint_is_not_forked_and_a_name_is_taken_once(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    drive(nano("origin", training={**TRAINING, "max_steps": 12}, checkpoint=KEEP, data={"validation": None}))
    fork(tmp_path, "origin@6", "branch")
    with pytest.raises(RequestError, match="already"):
        fork(tmp_path, "origin@6", "branch")
    with pytest.raises(NoValidCheckpoint, match="6, 12"):
        fork(tmp_path, "origin@7", "other")
    with pytest.raises(RequestError, match="best"):
        fork(tmp_path, "origin@best", "other")
    state = max((tmp_path / "origin/checkpoints/step-000000012").rglob("*.pt"), key=lambda path: path.stat().st_size)
    raw = bytearray(state.read_bytes())
    raw[len(raw) // 2] ^= 1
    state.write_bytes(raw)
    with pytest.raises(NoValidCheckpoint, match="SHA-256 differs"):
        fork(tmp_path, "origin@12", "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["branch", "origin"]


def machine(home: Path) -> Settings:
    """A machine of its own; token shards are shared."""
    real = Settings.from_environment()
    real.data_cache_dir.mkdir(parents=True, exist_ok=True)
    home.mkdir()
    (home / "data").symlink_to(real.data_cache_dir)
    return replace(real, mem_home=home)


def test_a_run_of_a_remote_store_is_forked_into_it(drive: Drive, tmp_path: Path) -> None:
    """From a machine that has never seen the run, and back into the store under its own name."""
    (tmp_path / "bucket").mkdir()
    url = f"local://{tmp_path}/bucket"  # through the same port as any other remote store
    here, there = (machine(tmp_path / name) for name in ("here", "there"))
    request = RuntimeRequest.model_validate({"run_id": "origin", "store": url, "device": "cpu", "training": TRAINING, "checkpoint": KEEP})
    origin = drive(request, settings=here)
    (step,) = (int(path.name[5:]) for path in (tmp_path / "bucket/origin/checkpoints").iterdir() if path.name == "step-000000024")
    for run in (f"origin@{step}", f"{url}/origin"):
        new_id = f"branch-{len(run)}"
        assert fork_run(ForkWish(run, new_id, url, ("training.max_steps=30",)), as_json=False, settings=there) == 0
        (file,) = (tmp_path / "there/live").glob(f"*/{new_id}/request.yaml")
    ended = drive(load_request(str(file)), settings=there)
    assert (ended.applied_steps, ended.forked_from and ended.forked_from.weights_digest) == (30, origin.weights_digest)
    assert (tmp_path / "bucket" / new_id / "run.json").is_file()
    with pytest.raises(RequestError, match="already"):
        fork_run(ForkWish("origin", new_id, url), as_json=False, settings=here)
    assert not list((tmp_path / "there/live").glob(".fetching-*"))


def test_a_fork_that_is_killed_leaves_nothing_that_trains(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    drive(nano("origin", training={**TRAINING, "max_steps": 6}, checkpoint=KEEP))
    code = f"from flows.cli import main; main(['fork', 'origin', 'branch', '--store', {str(tmp_path)!r}])"
    for seen in ("staging/*/save-*", "checkpoints/step-*"):
        child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        while not list(tmp_path.glob(f".forking-branch-*/branch/{seen}")) and child.poll() is None:
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        killed = child.wait() == -signal.SIGKILL
        assert not (tmp_path / "branch").exists() or not killed
        if (tmp_path / "branch").exists():  # it was quicker than the look
            break
    else:
        fork(tmp_path, "origin", "branch")
    assert drive(load_request(str(tmp_path / "branch/request.yaml"))).status == "completed"
