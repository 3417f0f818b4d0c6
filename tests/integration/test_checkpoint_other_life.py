"""Whole runs that find checkpoints of another life or of another run: refused or set aside aloud, never trained on in silence."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.commands.checkpoints import verify_checkpoints
from flows.commands.policy import replay_run
from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.testing.ports import Console

pytestmark = pytest.mark.integration
TRAINING = {"max_steps": 30, "segment_steps": 10, "global_batch_size": 4, "warmup_steps": 5, "schedule_steps": 100}
Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def lose_all_but_checkpoints(run: Path) -> None:
    """What a careless clean-up leaves."""
    for path in run.iterdir():
        if path.name != "checkpoints":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def digests(result: RunResult) -> tuple[str, str]:
    """What makes two runs the same run."""
    return result.trajectory_digest, result.weights_digest


@pytest.mark.parametrize("changed", [{"learning_rate": 0.5}, {"seed": 3}, {"learning_rate": 0.5, "max_steps": 10}], ids=str)
def test_checkpoints_of_another_life_are_refused_and_stay(drive: Drive, nano: Nano, tmp_path: Path, changed: dict[str, Any]) -> None:
    """Journal and record are gone, the request is another one: 74 with both ways out, twice, and not a byte of them is touched."""
    drive(nano("run", training=TRAINING))
    lose_all_but_checkpoints(tmp_path / "run")
    before = contents(tmp_path / "run" / "checkpoints")
    for _ in range(2):
        with pytest.raises(NoValidCheckpoint, match=r"another life of run run.*training\.") as caught:
            drive(nano("run", training=TRAINING | changed))
        assert "Give another run_id" in caught.value.remedy
        assert "away to begin anew" in caught.value.remedy
        assert contents(tmp_path / "run" / "checkpoints") == before
        assert not (tmp_path / "run" / "run.json").exists(), "the folder does not become the other life's"
    shutil.move(tmp_path / "run" / "checkpoints", tmp_path / "away")
    assert drive(nano("run", training=TRAINING | changed)).status == "completed"


def test_what_no_key_at_hand_signed_is_of_another_life_too(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Journal gone, and a key that the checkpoints were not signed with: nobody can tell whose they are, and nothing is overwritten."""
    drive(nano("run", training=TRAINING))
    lose_all_but_checkpoints(tmp_path / "run")
    before = contents(tmp_path / "run" / "checkpoints")
    keyed = Settings.from_environment({**os.environ, "MEM_MANIFEST_KEY": "one"})
    with pytest.raises(NoValidCheckpoint, match="signature is missing"):
        drive(nano("run", training=TRAINING), settings=keyed)
    assert contents(tmp_path / "run" / "checkpoints") == before


def test_the_same_life_goes_on_without_its_journal_and_says_so(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """To the same weights; and with less to do than was done, the result says what was done and never 'completed, 0 applied'."""
    plain = drive(nano("plain", training=TRAINING | {"max_steps": 40}))
    first = drive(nano("run", training=TRAINING))
    lose_all_but_checkpoints(tmp_path / "run")
    console = Console()
    less = drive(nano("run", training=TRAINING | {"max_steps": 10}), progress=console)
    assert (less.status, less.applied_steps, less.weights_digest) == ("completed", 30, first.weights_digest)
    assert less.tokens == first.tokens
    assert "could not be held against this run's journal" in console.text
    assert digests(drive(nano("run", training=TRAINING | {"max_steps": 40}))) == digests(plain)


def test_another_run_s_checkpoint_in_place_of_ours_is_set_aside(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Same run id, other seed: it proves itself. The run goes on from the one below it to the weights it would have had."""
    elsewhere = {"store": str(tmp_path / "elsewhere")}
    plain = drive(nano("run", training=TRAINING | {"max_steps": 40}).model_copy(update={"store": str(tmp_path / "plain")}))
    drive(nano("run", training=TRAINING))
    drive(nano("run", training=TRAINING | {"seed": 5}).model_copy(update=elsewhere))
    run, name = tmp_path / "run", checkpoint_name(30)
    shutil.rmtree(run / "checkpoints" / name)
    shutil.copytree(tmp_path / "elsewhere" / "run" / "checkpoints" / name, run / "checkpoints" / name)
    assert verify_checkpoints(run, as_json=False) == NoValidCheckpoint.exit_code
    answer = replay_run(run)
    assert answer.exit_code != 0
    assert f"DIFFERENT checkpoints/{name}: the journal names weights" in answer.text
    console = Console()
    result = drive(nano("run", training=TRAINING | {"max_steps": 40}), progress=console)
    assert digests(result) == digests(plain)
    assert "step 30 is not this run's and was set aside: it was born with other values: training.seed 5 there and 0 here" in console.text
    assert [path.name for path in (run / "quarantine").iterdir()] == [f"kept-1-{name}"]
    assert verify_checkpoints(run, as_json=False) == 0
    assert replay_run(run).exit_code == 0


def test_verify_judges_every_folder(drive: Drive, nano: Nano, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest copied from another step, a verdict that is gone, a folder without a manifest, a link: none goes unmentioned."""
    drive(nano("run", training=TRAINING))
    folder = tmp_path / "run" / "checkpoints"
    shutil.copy(folder / checkpoint_name(30) / "manifest.json", folder / checkpoint_name(20) / "manifest.json")
    (folder / checkpoint_name(10) / "verdict.json").unlink()
    (folder / checkpoint_name(7)).mkdir()
    (folder / checkpoint_name(8)).symlink_to(folder / checkpoint_name(30))
    assert verify_checkpoints(tmp_path / "run", as_json=False) == NoValidCheckpoint.exit_code
    lines = {line.split("  ")[-1]: line.split()[1].rstrip(":") for line in capsys.readouterr().err.splitlines()}
    assert next(iter(lines.items())) == ("BAD: incomplete: no manifest", "7")
    assert any(said.startswith("not judged: it holds") and step == "10" for said, step in lines.items())
    assert any(said.startswith("BAD: manifest is of step 30, the folder of step 20") for said in lines)
    assert lines["good"] == "30"
    assert any(said.startswith("BAD: it is no checkpoint's folder") for said in lines)


def test_a_new_run_beside_another_run_s_checkpoints_says_so(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Another run id in the manifests: left alone, said on the console, and not deleted where its place is needed."""
    drive(nano("other", training=TRAINING))
    theirs = contents(tmp_path / "other" / "checkpoints" / checkpoint_name(20))
    (tmp_path / "run").mkdir()
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "run" / "checkpoints")
    console = Console()
    assert drive(nano("run", training=TRAINING), progress=console).status == "completed"
    assert "the checkpoint of step 20 belongs to run other; it is left alone" in console.lines
    kept = [contents(path) for path in (tmp_path / "run" / "quarantine").iterdir()]
    assert theirs in kept
