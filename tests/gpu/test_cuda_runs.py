"""Whole runs and readings on a CUDA device: the same ports as on a CPU. Skipped where there is none."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.events import CheckpointJudged
from mem_core.infrastructure.machine.memory_probe_cuda import CudaProbe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1_800)]
MIB = 2**20
LEFT_BYTES = 3 * 2**30
BALLAST = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
block = torch.empty(max(1, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
Mem = Callable[..., Any]


@pytest.fixture(autouse=True)
def device() -> None:
    """A CUDA device, or the test is skipped."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def neighbour() -> Iterator[None]:
    """Another process that leaves about 3 GiB of the device free."""
    process = subprocess.Popen([sys.executable, "-c", BALLAST, str(LEFT_BYTES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield
    process.communicate("", timeout=60)


def trained(mem: Mem, folder: Path, run_id: str, *overrides: str, **sections: Any) -> dict[str, Any]:
    """The result of `mem train` on the device."""
    training = {"max_steps": 60, "segment_steps": 20, "warmup_steps": 5}
    request = {"run_id": run_id, "store": str(folder / "runs"), "device": "cuda", "training": training} | sections
    path = folder / f"{run_id}.json"
    path.write_text(json.dumps(request))
    done = mem("train", str(path), "--json", *(part for text in overrides for part in ("--set", text)), timeout_s=1_500)
    assert done.code == 0, done.err[-3000:]
    return done.answer


def test_the_allocator_and_the_device_are_read() -> None:
    """64 MiB more are 64 MiB more; the budget names the device's limit; nothing is measured by synchronising."""
    import torch

    probe = CudaProbe(0)
    torch.empty(1, device="cuda")
    probe.reset_peak()
    before = probe.usage()
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    during = probe.usage()
    del block
    assert during.used_bytes - before.used_bytes == 64 * MIB
    assert probe.usage().peak_bytes >= during.used_bytes
    budget = probe.budget()
    reading = probe.read()
    assert 0 < budget.budget_bytes <= reading.total_bytes
    assert budget.kind == "device"


def test_a_run_in_pieces_comes_to_the_same_loss(mem: Mem, tmp_path: Path) -> None:
    """60 steps at once, and 30 and 30 by two processes: within the tolerance that is stated for CUDA."""
    whole = trained(mem, tmp_path, "whole")
    trained(mem, tmp_path, "pieces", "training.max_steps=30", "training.schedule_steps=60")
    pieces = trained(mem, tmp_path, "pieces", "training.schedule_steps=60")
    assert whole["device"] == pieces["device"] == "cuda"
    assert pieces["loss_last"] == pytest.approx(whole["loss_last"], rel=1e-3)
    assert whole["memory"]["peak_bytes"] > 0


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_checkpoint_replays_within_the_tolerance(mem: Mem, tmp_path: Path, zero_stage: int) -> None:
    """Restored in fresh processes on the device, at each ZeRO stage."""
    result = trained(mem, tmp_path, "replayed", parallel={"zero_stage": zero_stage}, checkpoint={"validation": "replay"})
    events = [line.event for line in read_journal(Path(result["run_folder"]) / "journal")]
    verdicts = [event.verdict for event in events if isinstance(event, CheckpointJudged)]
    assert [(verdict.step, verdict.level, verdict.valid) for verdict in verdicts] == [(step, "replay", True) for step in (20, 40, 60)]


def test_a_full_device_is_no_fatal_end(mem: Mem, tmp_path: Path, neighbour: None) -> None:
    """A model whose whole batch does not fit into what a neighbour leaves: smaller passes, same global batch, no fatal OOM."""
    result = trained(
        mem, tmp_path, "tight", model={"source": "preset:llama-small"}, data={"sequence_length": 512},
        training={"max_steps": 20, "segment_steps": 10, "warmup_steps": 5, "global_batch_size": 64},
    )  # fmt: skip
    assert result["ooms_fatal"] == 0
    assert result["applied_steps"] == 20
