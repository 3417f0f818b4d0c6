"""The drills behind two deployments: what a restore drill proves, and that a killed chaos drill leaves nothing behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from prefect_site import wait_for
from process_tree import alive, marked_processes

from flows.commands.restore_probe import prove
from flows.restore_drill_flow import error_from, prove_newest
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.infrastructure.settings import Settings
from mem_core.runtime.ranks.local.processes import ForkServer

pytestmark = pytest.mark.integration
TRAINING = {"max_steps": 15, "segment_steps": 5, "global_batch_size": 4, "warmup_steps": 2}


@pytest.fixture
def run_folder(nano: Callable[..., RuntimeRequest], drive: Callable[..., RunResult], tmp_path: Path) -> Path:
    """A finished run with checkpoints at 5, 10 and 15."""
    drive(nano("run", training=TRAINING))
    return tmp_path / "run"


def test_a_restore_drill_steps_from_the_newest_and_redoes_what_is_recorded(run_folder: Path, fork_server: ForkServer) -> None:
    """Replay: the newest makes finite steps, the one before makes the recorded ones. A record of another state is found by it alone."""
    settings = Settings.from_environment()
    before = {path: path.stat().st_mtime_ns for path in run_folder.rglob("*") if path.is_file()}
    newest, gone_on_from = prove(run_folder, "replay", settings, fork_server)
    assert (newest["step"], newest["level"], newest["valid"]) == (15, "replay", True)
    assert newest["steps"].startswith("finite")
    assert (gone_on_from["step"], gone_on_from["steps"], gone_on_from["valid"]) == (10, "as recorded", True)
    assert {path: path.stat().st_mtime_ns for path in run_folder.rglob("*") if path.is_file()} == before, "it changes nothing"

    path = run_folder / "metrics" / "step-000000015.npz"
    columns = dict(np.load(path))
    columns["loss"][1] = np.nextafter(columns["loss"][1], 100.0)
    np.savez(path, **columns)
    assert [row["valid"] for row in prove(run_folder, "integrity", settings)] == [True]
    newest, gone_on_from = prove(run_folder, "replay", settings, fork_server)
    assert newest["valid"]
    assert not gone_on_from["valid"]
    assert "loss of step 12" in gone_on_from["reasons"]


def test_a_restore_drill_finds_damage_and_never_passes_over_it(run_folder: Path) -> None:
    """A flipped bit, then a manifest that cannot be read, then no checkpoint: judged by the drill's own process, as the flow does it."""
    checkpoint = run_folder / "checkpoints" / "step-000000015"
    weights = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(bytes(data))
    (verdict,) = prove_newest.fn(str(run_folder), "integrity")
    assert (verdict["step"], verdict["valid"]) == (15, False)
    assert weights.name in verdict["reasons"]

    (checkpoint / "manifest.json").write_text("{}")
    (verdict,) = prove_newest.fn(str(run_folder), "integrity")
    assert (verdict["step"], verdict["valid"]) == (15, False)

    shutil.rmtree(run_folder / "checkpoints")
    with pytest.raises(NoValidCheckpoint, match="no committed checkpoint"):
        prove_newest.fn(str(run_folder), "integrity")


def test_an_error_of_the_judging_process_keeps_its_kind() -> None:
    told = {"error": "DataError", "problem": "gone", "remedy": "Restore it.", "field": "data.train", "value": "a", "bound": "b"}
    error = error_from(told)
    assert (type(error).__name__, error.exit_code, error.field) == ("DataError", 66, "data.train")


DRILL_IN_A_FLOW = """
import json, sys
from flows.chaos_drill_flow import run_drill
run_drill.fn(json.loads(sys.argv[1]), 0)
"""


@contextlib.contextmanager
def drilling(store: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that drills as the flow does."""
    training = {"max_steps": 100_000, "segment_steps": 50}
    chaos = {"kinds": ["kill_rank"], "at_steps": [90_000]}
    request = {"run_id": "drilled", "store": str(store), "device": "cpu", "training": training, "chaos": chaos}
    process = subprocess.Popen([sys.executable, "-c", DRILL_IN_A_FLOW, json.dumps(request)], stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def is_drill(process: psutil.Process) -> bool:
    try:
        return "flows.commands.owned" in process.cmdline()
    except psutil.Error:
        return False


def test_a_chaos_drill_dies_with_the_flow_process(tmp_path: Path) -> None:
    """kill -9 of the process that waits for it, as soon as there is something to leave behind."""
    with drilling(tmp_path) as flow:
        children: list[psutil.Process] = []
        wait_for(lambda: bool(children.extend(filter(is_drill, psutil.Process(flow.pid).children())) or children), "the drill", 60)
        os.kill(flow.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, children)), "end of the drill", 5)


@pytest.mark.slow
def test_a_chaos_drill_that_trains_leaves_no_process_behind(tmp_path: Path) -> None:
    """The same with the run under way: drill, trainer, its Prefect server, fork server and ranks are gone."""
    with drilling(tmp_path) as flow:
        folder = tmp_path / "drilled-drill-0"
        wait_for(lambda: any(folder.glob("checkpoints/step-*/verdict.json")), "a proven checkpoint", 240)
        family = psutil.Process(flow.pid).children(recursive=True)
        assert len(family) >= 4
        os.kill(flow.pid, signal.SIGKILL)
        took_s = wait_for(lambda: not any(map(alive, family)) and not marked_processes(folder), "end of every process", 5)
        print(f"{len(family)} processes gone {took_s:.2f} s after the kill")
