"""`kill -9` at random moments: of the flow, of ranks, of whatever else the run has alive, also in the middle of saves and restores."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.fold import fold_result
from mem_core.core.run.state_manager import read_journal
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.chaos.drill.drill import leftovers
from mem_core.runtime.chaos.drill.supervised_run import SupervisedRun
from mem_core.runtime.chaos.faults.view import RunView

pytestmark = pytest.mark.integration
SEED = 20_261
LORA: dict[str, Any] = {"lora": {"rank": 4, "dropout": 0.1}}
CHILD = Path(__file__).with_name("drive_child.py")


class Killer:
    """Kills something of the run at random moments, `moments` times, as long as the run lasts."""

    def __init__(self, view: RunView, moments: int, longest_gap_s: float) -> None:
        self._view = view
        self._rng = random.Random(SEED)
        self._moments = moments
        self._longest_gap_s = longest_gap_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.killed: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while len(self.killed) < self._moments and not self._over.wait(self._rng.uniform(0.02, self._longest_gap_s)):
            sign = self._view.sign()
            processes = self._view.processes()
            if sign is None or not processes:
                continue
            roles = sorted({process.role for process in processes})
            # The flow takes seconds to come back: one in five is enough to meet every phase of it.
            role = "flow" if self._rng.random() < 0.2 and "flow" in roles else self._rng.choice([r for r in roles if r != "flow"] or roles)
            victim = next(process for process in processes if process.role == role)
            try:
                os.kill(victim.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.killed.append(role)


def killed_run(folder: Path, request: RuntimeRequest, moments: int, longest_gap_s: float) -> tuple[RunResult, list[str], SupervisedRun]:
    """The run's result, what was killed, and how often it was started."""
    path = folder / "request.json"
    path.write_text(request.model_dump_json())
    command = [sys.executable, str(CHILD), str(os.getpid()), str(path)]
    run = SupervisedRun(command, dict(Settings.from_environment().environ), folder / "run.log", max_starts=moments + 2)
    view = RunView(folder / request.run_id)
    killer = Killer(view, moments, longest_gap_s)
    killer.start()
    try:
        code = run.run_to_end()
    finally:
        killer.finish()
        run.end()
    assert code == 0, (folder / "run.log").read_text()[-3000:]
    assert [score for score in leftovers(folder / request.run_id, view) if not score.held] == []
    return fold_result(read_journal(folder / request.run_id / "journal")), killer.killed, run


def check(
    tmp_path: Path, drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest], moments: int, steps: int, **more: Any
) -> None:
    """`more`: sections of the request, such as what of the model trains."""
    shape = more | {
        "training": {"max_steps": steps, "segment_steps": 20, "warmup_steps": 5},
        "resilience": {"max_failures_without_progress": 100},
    }
    started_s = time.monotonic()
    struck, killed, run = killed_run(tmp_path, nano("struck", **shape), moments, longest_gap_s=2.0)
    clean = drive(nano("clean", **shape))
    print(f"{len(killed)} kills ({', '.join(sorted(set(killed)))}), {len(run.endings)} starts, {time.monotonic() - started_s:.0f} s")
    assert len(killed) == moments, "the run was over before all kills were done: give it more steps"
    assert len(run.endings) == 1 + killed.count("flow")
    assert struck.applied_steps == steps
    assert (struck.weights_digest, struck.trajectory_digest) == (clean.weights_digest, clean.trajectory_digest)


def test_six_kills_at_random_moments(tmp_path: Path, drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest]) -> None:
    """Each time it goes on, and the weights are those of a run in peace."""
    check(tmp_path, drive, nano, moments=6, steps=400)


@pytest.mark.slow
def test_adapters_survive_kills_at_random_moments(
    tmp_path: Path, drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest]
) -> None:
    """Kills meet evaluations too, which stand between the segments."""
    check(tmp_path, drive, nano, moments=3, steps=240, model=LORA, evaluation={"every_steps": 40})


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("part", [{}, {"model": LORA, "evaluation": {"every_steps": 100}}], ids=["whole", "lora"])
def test_fifty_kills_at_random_moments(
    part: dict[str, Any], tmp_path: Path, drive: Callable[..., RunResult], nano: Callable[..., RuntimeRequest]
) -> None:
    """The same for longer."""
    check(tmp_path, drive, nano, moments=50, steps=3_000, **part)
