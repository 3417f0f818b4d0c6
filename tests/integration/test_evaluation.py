"""Held-out rows during training: same training bits, the same figures after any fault, the best checkpoint kept, an end when it is time."""

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.events import Evaluated, RunStoppedEarly
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.memory_faults import fail_evaluation, fired
from mem_core.testing.ports import Console, with_port

Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]
TRAINING = {"max_steps": 20, "segment_steps": 8, "global_batch_size": 4, "warmup_steps": 2, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """60 rows to train on, 10 of the same kind to validate on, and 7 of another kind."""
    folder = tmp_path_factory.mktemp("rows")
    for name, rows in {"train": range(60), "held": range(60, 70)}.items():
        lines = [json.dumps({"text": f"{row:>3} " + "abcdefgh" * (1 + row % 3)}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "other.jsonl").write_text("\n".join(json.dumps({"text": "zyxw" * 6}) for _ in range(7)) + "\n")
    return {
        "train": [str(folder / "train.jsonl")], "validation": [str(folder / "held.jsonl")], "sequence_length": 32, "packing": False,
        "other": str(folder / "other.jsonl"),
    }  # fmt: skip


@pytest.fixture
def asked(nano: Nano, data: dict[str, Any]) -> Callable[..., RuntimeRequest]:
    """A request that evaluates both sets after every five steps, which is no multiple of its segments."""

    def make(run_id: str, training: dict[str, Any] | None = None, **evaluation: Any) -> RuntimeRequest:
        rows = {name: value for name, value in data.items() if name != "other"}
        section = {"every_steps": 5, "sets": {"other": data["other"]}, **evaluation}
        return nano(run_id, data=rows, training=TRAINING | (training or {}), evaluation=section)

    return make


def digests(result: RunResult) -> tuple[str, str]:
    return result.trajectory_digest, result.weights_digest


def evaluations(result: RunResult) -> dict[int, dict[str, tuple[float, float | None]]]:
    """Step -> set -> (loss, accuracy), of each step the last in the journal."""
    events = [line.event for line in read_journal(Path(result.run_folder) / "journal")]
    return {
        event.step: {name: (figures.loss, figures.token_accuracy) for name, figures in event.sets.items()}
        for event in events
        if isinstance(event, Evaluated)
    }


def kept(result: RunResult) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (Path(result.run_folder) / "checkpoints").glob("step-*"))


def test_training_has_the_same_bits_with_and_without(drive: Drive, nano: Nano, asked: Callable[..., RuntimeRequest]) -> None:
    console = Console()
    looked = drive(asked("looked", max_rows=6), progress=console)
    blind = drive(asked("blind", every_steps=None, sets={}))
    assert digests(looked) == digests(blind)
    assert sorted(evaluations(looked)) == [5, 10, 15, 20]
    assert sorted(evaluations(blind)) == [20]
    assert (looked.validation_rows, looked.validation_rows_total) == (6, 10)
    assert {name: figures.rows for name, figures in looked.evaluation.items()} == {"validation": 6, "other": 6}
    assert (blind.validation_rows, blind.validation_rows_total) == (10, 10), "every row where nobody set a bound"
    assert "step 5: validation loss" in console.text
    assert "tokens right, over 6 of 10 rows, evenly spread" in console.text
    first, last = evaluations(looked)[5]["validation"], evaluations(looked)[20]["validation"]
    assert last[0] < first[0]
    assert last[1] is not None
    assert 0 < last[1] <= 1
    folder = Path(looked.run_folder)
    with np.load(folder / "metrics" / "evaluations.npz", allow_pickle=False) as columns:
        assert columns["step"].tolist() == [5, 5, 10, 10, 15, 15, 20, 20]
        assert columns["set"].tolist() == ["validation", "other"] * 4
    assert "Held-out rows" in (folder / "report.html").read_text()


class DiesInEvaluation:
    """The first `times` evaluations at a step kill the rank after the first batch."""

    def __init__(self, folder: Path, step: int, times: int, kill: bool = True) -> None:
        self.folder, self.step, self.times, self.kill = folder, step, times, kill

    def __call__(self, runner: Any) -> None:
        score = runner._passes.score

        def dying_score(*arguments: Any) -> Any:
            marker = self.folder / "died"
            seen = marker.stat().st_size if marker.exists() else 0
            if runner.position.applied_steps == self.step and seen < self.times:
                with marker.open("ab") as file:
                    file.write(b".")
                if self.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise MemoryError("made up: no room for a pass of an evaluation")
            return score(*arguments)

        runner._passes.score = dying_score


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "out of memory"])
def test_an_interrupted_evaluation_is_done_again(kill: bool, drive: Drive, asked: Callable[..., RuntimeRequest], tmp_path: Path) -> None:
    """From the checkpoint that it belongs to: the same figures, the same digests, and training's plan stays as it was."""
    clean = drive(asked("clean"))
    port = DiesInEvaluation(tmp_path, step=10, times=2, kill=kill)
    hit = drive(asked("hit"), options=with_port(port))
    assert (tmp_path / "died").stat().st_size == 2
    assert digests(hit) == digests(clean)
    assert evaluations(hit).keys() == evaluations(clean).keys()
    for step, sets in evaluations(clean).items():
        for name, (loss, accuracy) in sets.items():
            assert evaluations(hit)[step][name] == (pytest.approx(loss, rel=1e-6), accuracy), "smaller passes round otherwise"
    assert (hit.memory.plan_changes, hit.status) == ((), "completed")


def test_an_evaluation_that_never_comes_to_an_end_ends_no_run(drive: Drive, asked: Callable[..., RuntimeRequest], tmp_path: Path) -> None:
    clean, console = drive(asked("clean")), Console()
    hit = drive(asked("never"), options=with_port(DiesInEvaluation(tmp_path, step=10, times=99)), progress=console)
    assert digests(hit) == digests(clean)
    assert sorted(evaluations(hit)) == [5, 15, 20]
    assert "no evaluation after step 10: the workers died in each try" in console.text


def test_a_pass_that_does_not_fit_makes_its_own_passes_smaller(drive: Drive, asked: Callable[..., RuntimeRequest], tmp_path: Path) -> None:
    clean = drive(asked("clean"))
    hit = drive(asked("tight"), options=with_port(partial(fail_evaluation, rows_that_fit=1, folder=tmp_path)))
    assert fired(tmp_path, "failures") > 0
    assert digests(hit) == digests(clean)
    assert (hit.restarts, hit.memory.plan_changes) == (0, ())
    assert hit.validation_loss == pytest.approx(clean.validation_loss, rel=1e-6)


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (2, 3)])
def test_ranks_share_the_rows(ranks: int, stage: int, drive: Drive, asked: Callable[..., RuntimeRequest]) -> None:
    one, request = drive(asked("one")), asked("many")
    shape = request.parallel.model_copy(update={"num_ranks": ranks, "zero_stage": stage})
    many = drive(request.model_copy(update={"parallel": shape}))
    assert many.validation_loss == pytest.approx(one.validation_loss, rel=1e-4)
    assert {name: figures.rows for name, figures in many.evaluation.items()} == {"validation": 10, "other": 7}


def rising(runner: Any) -> None:
    """Held-out rows look worse with every evaluation after the one at step 10."""
    score = runner._passes.score

    def worse(*arguments: Any) -> Any:
        loss, right, counted = score(*arguments)
        return loss * (1 + max(0, runner.position.applied_steps - 10)), right, counted

    runner._passes.score = worse


def test_the_best_checkpoint_stays_and_patience_ends_the_run(drive: Drive, asked: Callable[..., RuntimeRequest]) -> None:
    """Completed, exit 0, with fewer steps than asked and the reason; the same command again has nothing to do; more patience goes on."""
    request = asked("patient", {"max_steps": 60}, keep_best=True, patience=3)
    request = request.model_copy(update={"checkpoint": request.checkpoint.model_copy(update={"keep_last": 1})})
    result = drive(request, options=with_port(rising))
    assert (result.status, result.exit_code, result.applied_steps) == ("completed", 0, 25)
    assert result.stopped_early is not None
    assert (result.stopped_early.step, result.stopped_early.metric) == (25, "validation/loss")
    assert result.best is not None
    assert result.best.step == 10
    assert result.best.value == evaluations(result)[10]["validation"][0]
    assert kept(result) == [10, 25]
    events = [line.event for line in read_journal(Path(result.run_folder) / "journal")]
    assert len([event for event in events if isinstance(event, RunStoppedEarly)]) == 1
    again = drive(request, options=with_port(rising))
    assert (again.applied_steps, digests(again), again.stopped_early) == (25, digests(result), result.stopped_early)
    patient = request.model_copy(update={"evaluation": request.evaluation.model_copy(update={"patience": 5})})
    longer = drive(patient, options=with_port(rising))
    assert (longer.applied_steps, longer.status) == (35, "completed")
    assert kept(longer) == [10, 35]


def test_without_the_wish_the_best_is_rotated_like_any_other(drive: Drive, asked: Callable[..., RuntimeRequest]) -> None:
    request = asked("rotated")
    request = request.model_copy(update={"checkpoint": request.checkpoint.model_copy(update={"keep_last": 1})})
    result = drive(request, options=with_port(rising))
    assert result.best is not None
    assert result.best.step == 10
    assert checkpoint_name(10) not in [path.name for path in (Path(result.run_folder) / "checkpoints").iterdir()]
