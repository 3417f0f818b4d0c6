"""Processes that grow: replaced before the wall however long the segment is, and noticed however far the wall is."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.events import MemoryPlanChanged, Noted, SegmentEnded
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.domain.segment import SegmentCompleted
from mem_core.runtime.session.opening.stages import Prepared
from mem_core.testing.memory_faults import leak, leak_at_saves
from mem_core.testing.ports import recorded, replaying, with_port

pytestmark = pytest.mark.integration
Drive = Callable[..., RunResult]
Nano = Callable[..., RuntimeRequest]
MIB = 2**20


def notes(result: RunResult) -> list[str]:
    """The journal's lines on memory."""
    lines = read_journal(Path(result.run_folder) / "journal")
    return [line.event.text for line in lines if isinstance(line.event, Noted) and line.event.text.startswith("memory")]


def test_a_leak_in_every_process_ends_segments_before_the_wall(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """10 MiB a step under RLIMIT_AS, room for 57 steps, one segment of 120: no failed allocation, no restart, the cause by its name."""
    training = {"max_steps": 120, "segment_steps": 120, "global_batch_size": 8, "warmup_steps": 2}
    result = drive(nano("wall", training=training), options=with_port(partial(leak, bytes_per_step=10 * MIB, headroom_bytes=570 * MIB)))
    assert (result.status, result.applied_steps) == ("completed", 120)
    assert (result.restarts, result.ooms_absorbed, result.ooms_fatal, result.memory.plan_changes) == (0, 0, 0, ())
    found = [note for note in notes(result) if "a leak of about" in note]
    assert len(found) >= 2
    said = [note for note in found if "VmHWM" in note]
    assert said
    assert all("a step under RLIMIT_AS" in note and "tokens work" in note for note in said)
    assert all(9.5 <= float(note.split("a leak of about ")[1].split(" MiB")[0]) <= 11 for note in said)
    ended = [line.event.outcome for line in read_journal(Path(result.run_folder) / "journal") if isinstance(line.event, SegmentEnded)]
    assert all(isinstance(outcome, SegmentCompleted) and outcome.to_step - outcome.from_step < 57 for outcome in ended)
    twin = drive(nano("free", training=training))
    assert (twin.trajectory_digest, twin.weights_digest) == (result.trajectory_digest, result.weights_digest)


def test_a_steep_leak_that_fresh_processes_cure_goes_on(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """40 MiB a step: met at an allocation, after fewer steps than a slope needs. From then on workers are replaced before that; nothing
    is laid to size."""
    training = {"max_steps": 24, "segment_steps": 24, "global_batch_size": 8, "warmup_steps": 2}
    result = drive(nano("steep", training=training), options=with_port(partial(leak, bytes_per_step=40 * MIB, headroom_bytes=380 * MIB)))
    assert (result.status, result.applied_steps) == ("completed", 24)
    assert 1 <= result.restarts <= 2
    assert any("a process grew until it was ended after" in note and "a leak" in note for note in notes(result))
    events = [line.event for line in read_journal(tmp_path / "steep" / "journal")]
    assert all(event.change.failed_tokens == 0 for event in events if isinstance(event, MemoryPlanChanged)), "nothing is laid to size"
    fixed = replaying(recorded(result))
    twin = drive(nano("steep-free", training=training), options=fixed)
    assert (twin.trajectory_digest, twin.weights_digest) == (result.trajectory_digest, result.weights_digest)


def kill_grown(runner: Any, bytes_per_step: int, steps: int) -> None:
    """This process keeps some memory of every step, near enough to a limit to be read at each, and is killed in its `steps`th."""
    runner.memory.reader = runner._local.memory_reader(runner.memory.reader.read().used_bytes + 300 * MIB)
    step, kept = runner.engine.step, []

    def growing_step() -> bool:
        kept.append(b"x" * bytes_per_step)  # written to, so that it is resident
        if len(kept) >= steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    runner.engine.step = growing_step


def test_a_process_that_the_kernel_kills_for_its_growth_is_replaced_sooner(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """What it had grown by is known from its heartbeats: nothing shrinks, and the same bits come out."""
    training = {"max_steps": 24, "segment_steps": 24, "global_batch_size": 8, "warmup_steps": 2}

    def change(prepared: Prepared) -> None:
        ranks = prepared.session.segments.ranks
        ranks.setup = replace(ranks.setup, memory_limit_bytes=300 * MIB)  # less than any rank uses: the peak is "near" it

    port = partial(kill_grown, bytes_per_step=40 * MIB, steps=6)
    result = drive(nano("killed", training=training), options=with_port(port), prepared=change)
    assert (result.status, result.applied_steps) == ("completed", 24)
    assert 1 <= result.restarts <= 2
    assert result.memory.plan_changes == ()
    assert any("a process grew until it was ended after" in note for note in notes(result))
    twin = drive(nano("killed-free", training=training))
    assert (twin.trajectory_digest, twin.weights_digest) == (result.trajectory_digest, result.weights_digest)


@pytest.mark.slow
def test_a_leak_of_30_mib_a_save_is_noticed_far_from_every_limit(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Nothing is short, so nothing is done; the growth is said with its numbers, once for each half as much again."""
    training = {"max_steps": 28, "segment_steps": 1, "global_batch_size": 8, "warmup_steps": 2}
    result = drive(nano("saves", training=training), options=with_port(partial(leak_at_saves, bytes_per_save=30 * MIB)))
    found = [note for note in notes(result) if "memory grows from segment to segment" in note]
    assert 1 <= len(found) <= 3
    assert "a leak of about 30" in found[0]
    clean = drive(nano("clean", training=training))
    assert not [note for note in notes(clean) if "grows" in note]
    assert (clean.trajectory_digest, clean.weights_digest) == (result.trajectory_digest, result.weights_digest)
