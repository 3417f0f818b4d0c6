"""Checkpoints whose bytes hold and that the engine cannot load: an older one is tried, and only what is at fault is set aside."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.fold import fold_state
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.checkpoint import checkpoint_name
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.ports import Console, with_port

pytestmark = pytest.mark.integration
TRAINING = {"max_steps": 30, "segment_steps": 10, "global_batch_size": 4, "warmup_steps": 5, "schedule_steps": 100}
MORE = TRAINING | {"max_steps": 40}
Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]


@dataclass(frozen=True)
class Unloadable:
    """Loading the checkpoints of these steps raises, or kills the rank; each time is counted in a file."""

    steps: tuple[int, ...]
    counter: str
    how: str = "error"
    times: int = 1_000

    def __call__(self, runner: Any) -> None:
        """Called while the rank restores, when the state has been read."""
        count = Path(self.counter)
        done = count.stat().st_size if count.exists() else 0
        if runner.position.applied_steps in self.steps and done < self.times:
            with count.open("a") as file:
                file.write("x")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("ds_config")


def digests(result: RunResult) -> tuple[str, str]:
    """What makes two runs the same run."""
    return result.trajectory_digest, result.weights_digest


@pytest.mark.parametrize(("how", "loads"), [("error", 2), ("kill", 3)])
def test_the_newest_cannot_be_loaded(how: str, loads: int, drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Tried again once (what comes from outside twice), then the one below it, to the same weights; one line, one in quarantine."""
    plain = drive(nano("plain", training=MORE))
    drive(nano("run", training=TRAINING))
    console, counter = Console(), tmp_path / "count"
    port = Unloadable((30,), str(counter), how, times=loads)
    request = nano("run", training=MORE, resilience={"max_failures_without_progress": 1})
    result = drive(request, options=with_port(port), progress=console)
    assert digests(result) == digests(plain)
    assert counter.stat().st_size == loads
    said = [line for line in console.lines if "it is in quarantine, going on from step 20" in line]
    assert len(said) == 1
    assert "step 30 is whole and cannot be loaded" in said[0]
    quarantine = tmp_path / "run" / "quarantine"
    assert [path.name for path in quarantine.iterdir()] == [f"kept-1-{checkpoint_name(30)}"]
    assert fold_state(read_journal(tmp_path / "run" / "journal")).failures_without_progress == 0


def test_a_load_that_fails_once_costs_no_checkpoint(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    drive(nano("run", training=TRAINING))
    result = drive(nano("run", training=MORE), options=with_port(Unloadable((30,), str(tmp_path / "count"), times=1)))
    assert (result.status, result.applied_steps, result.checkpoints.rejected) == ("completed", 40, 0)


def test_where_nothing_loads_everything_stays(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """74 after two tries of each, by name; nothing was moved, so that a mended machine goes on by the same command."""
    drive(nano("run", training=TRAINING))
    counter = tmp_path / "count"
    with pytest.raises(NoValidCheckpoint, match=r"step 10 is whole and could not be loaded, nor could those of steps 20, 30"):
        drive(nano("run", training=MORE), options=with_port(Unloadable((10, 20, 30), str(counter))))
    assert counter.stat().st_size == 6
    assert list((tmp_path / "run" / "quarantine").iterdir()) == []
    console = Console()
    assert drive(nano("run", training=MORE), progress=console).applied_steps == 40
    assert not [line for line in console.lines if "quarantine" in line]


def test_a_checkpoint_that_was_put_back_is_used_again(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """What was set aside for a reason of the machine keeps its verdict: a person moves the folder back, and that is all."""
    drive(nano("run", training=TRAINING))
    drive(nano("run", training=TRAINING | {"max_steps": 31}), options=with_port(Unloadable((30,), str(tmp_path / "count"))))
    run = tmp_path / "run"
    (kept,) = (run / "quarantine").iterdir()
    (run / "checkpoints" / checkpoint_name(31)).rename(tmp_path / "away")
    kept.rename(run / "checkpoints" / checkpoint_name(30))
    console = Console()
    assert drive(nano("run", training=MORE), progress=console).applied_steps == 40
    assert "step 31 had been proven, and no copy of that was found: going on from step 30" in console.text


def test_a_damaged_newest_checkpoint_is_said_at_the_start(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    drive(nano("run", training=TRAINING))
    (shard, *_) = sorted((tmp_path / "run" / "checkpoints" / checkpoint_name(30)).glob("*.pt"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    console = Console()
    assert drive(nano("run", training=MORE), progress=console).applied_steps == 40
    assert [line for line in console.lines if "step 30 skipped" in line and "SHA-256 differs" in line]
