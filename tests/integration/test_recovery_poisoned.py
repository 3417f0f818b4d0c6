"""Batches that always fail, numbers that are not finite, losses that are far out: what the user chose happens, and is exact on resume."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos_ports import Poison, Slow

from mem_core.core.run.state_manager import read_journal
from mem_core.domain.errors import Interrupted, NoProgress
from mem_core.domain.events import BatchSkipped, CheckpointJudged, Noted, PolicyDecided
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.testing.ports import with_port

pytestmark = pytest.mark.integration
Drive, Nano = Callable[..., RunResult], Callable[..., RuntimeRequest]
STEPS = {"max_steps": 40, "segment_steps": 10, "warmup_steps": 5}
BATCH = 14
WHOLE: dict[str, Any] = {}
LORA: dict[str, Any] = {"lora": {"rank": 4, "dropout": 0.1}}
PARTS_SLOW = [pytest.param(WHOLE, id="whole"), pytest.param(LORA, id="lora", marks=pytest.mark.slow)]


@pytest.fixture
def poisoned(drive: Drive, nano: Nano, tmp_path: Path) -> Callable[..., RunResult]:
    """Drive a run whose batch 14 goes wrong."""

    def run(
        how: str, run_id: str = "poisoned", times: int = 1_000, steps: dict[str, int] = STEPS, *, batch: int = BATCH,
        validation: str = "integrity", delay_s: float = 0.0, part: dict[str, Any] = WHOLE, **resilience: Any,
    ) -> RunResult:  # fmt: skip
        poison = Poison(batch, how, str(tmp_path / f"{run_id}.count"), times, delay_s)
        request = nano(run_id, model=part, training=steps, resilience=resilience, checkpoint={"validation": validation})
        return drive(request, options=with_port(poison))

    return run


def events_of(tmp_path: Path, run_id: str, kind: type) -> list[Any]:
    return [line.event for line in read_journal(tmp_path / run_id / "journal") if isinstance(line.event, kind)]


@pytest.mark.parametrize("part", PARTS_SLOW)
@pytest.mark.parametrize("how", ["error", "nan", "kill"])
def test_a_batch_that_always_fails_ends_in_bounded_time_and_names_its_samples(
    poisoned: Callable[..., RunResult], tmp_path: Path, how: str, part: dict[str, Any]
) -> None:
    """Exit 79 after the allowed restarts, with the batch and its samples in the message."""
    with pytest.raises(NoProgress) as caught:
        poisoned(how, part=part, max_failures_without_progress=2)
    text = str(caught.value)
    assert f"Batch {BATCH}" in text
    assert "samples [" in text
    assert (tmp_path / "poisoned.count").stat().st_size == 3


@pytest.mark.parametrize("part", PARTS_SLOW)
def test_a_poisoned_batch_is_left_out_where_allowed_and_resume_is_exact(
    poisoned: Callable[..., RunResult], tmp_path: Path, part: dict[str, Any]
) -> None:
    """Skipped once and for all: 40 applied steps, one skipped, and the same weights whether or not the run was cut in between."""
    whole = poisoned("error", "whole", part=part, on_poisoned_batch="skip")
    assert (whole.status, whole.applied_steps, whole.skipped_steps) == ("completed", 40, 1)
    (skip,) = events_of(tmp_path, "whole", BatchSkipped)
    assert skip.batch_index == BATCH
    assert len(skip.sample_ids) == 8
    poisoned("error", "cut", steps={**STEPS, "max_steps": 25, "schedule_steps": 40}, part=part, on_poisoned_batch="skip")
    resumed = poisoned("error", "cut", steps={**STEPS, "schedule_steps": 40}, part=part, on_poisoned_batch="skip")
    assert (resumed.applied_steps, resumed.skipped_steps) == (40, 1)
    assert (resumed.weights_digest, resumed.trajectory_digest) == (whole.weights_digest, whole.trajectory_digest)


@pytest.mark.parametrize("part", PARTS_SLOW)
@pytest.mark.parametrize("how", ["error", "nan"])
def test_a_poisoned_batch_right_after_a_checkpoint_does_not_condemn_it(
    poisoned: Callable[..., RunResult], tmp_path: Path, how: str, part: dict[str, Any]
) -> None:
    """Replay meets the same batch in its fresh processes, before and after it is left out: every checkpoint stays good."""
    skip = {"on_poisoned_batch": "skip", "on_non_finite": "skip"}
    result = poisoned(how, "replayed", batch=10, validation="replay", delay_s=2, part=part, **skip)
    assert (result.status, result.applied_steps, result.skipped_steps) == ("completed", 40, 1)
    verdicts = [
        (event.verdict.step, event.verdict.level, event.verdict.valid) for event in events_of(tmp_path, "replayed", CheckpointJudged)
    ]
    assert verdicts == [(step, "replay", True) for step in (10, 20, 30, 40)]


@pytest.mark.parametrize("part", PARTS_SLOW)
def test_numbers_that_are_not_finite_once_cost_nothing(
    poisoned: Callable[..., RunResult], drive: Drive, nano: Nano, tmp_path: Path, part: dict[str, Any]
) -> None:
    """The default: roll back, do the batch again, and nobody can tell from the weights. Every second is booked once."""
    began_unix_s = time.time()
    struck = poisoned("nan", "struck", times=1, part=part)
    wall_s = read_journal(tmp_path / "struck" / "journal")[-1].time_unix_s - began_unix_s
    assert sum(struck.goodput.seconds.values()) == pytest.approx(wall_s, rel=0.01, abs=0.1)
    assert struck.goodput.seconds["redone"] > 0
    assert struck.goodput.seconds["restart"] > 0
    clean = drive(nano("clean", model=part, training=STEPS))
    assert struck.restarts == 1
    assert (struck.weights_digest, struck.trajectory_digest) == (clean.weights_digest, clean.trajectory_digest)


def test_a_lowered_rate_goes_through_the_policy_engine_for_that_segment_alone(poisoned: Callable[..., RunResult], tmp_path: Path) -> None:
    """Recorded as a decision of segment 1; the others keep what they had."""
    result = poisoned("nan", "lowered", times=1, on_non_finite="lower_lr")
    assert result.status == "completed"
    decided = events_of(tmp_path, "lowered", PolicyDecided)
    assert [(event.segment_index, event.decision.applied_hyperparams.lr_multiplier) for event in decided] == [(0, 1.0), (1, 0.5)]


@pytest.mark.parametrize("part", PARTS_SLOW)
def test_a_loss_that_is_far_out_rolls_back(drive: Drive, nano: Nano, tmp_path: Path, part: dict[str, Any]) -> None:
    """With a threshold set, a spike in segment 3 is a fault; it does not come again, and the weights are those of a clean run."""
    steps = {"max_steps": 60, "segment_steps": 30, "warmup_steps": 5}
    poison = Poison(45, "spike", str(tmp_path / "spiked.count"), times=1)
    sections = {"model": part, "training": steps, "resilience": {"loss_spike_factor": 20}}
    spiked, clean = drive(nano("spiked", **sections), options=with_port(poison)), drive(nano("clean", **sections))
    assert [fault.kind for fault in spiked.faults] == ["non_finite"]
    assert "loss_spike" in spiked.faults[0].detail
    assert clean.faults == ()
    assert spiked.weights_digest == clean.weights_digest


def test_a_preemption_notice_commits_and_stops(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Exit 75, with a validated checkpoint beyond where the notice came; the same request goes on."""
    notice = tmp_path / "notice"
    request = nano("preempted", training={"max_steps": 100_000, "segment_steps": 100_000}, resilience={"preemption_file": str(notice)})

    def before(session: Any, segment: Any) -> None:
        notice.touch()

    with pytest.raises(Interrupted) as caught:
        drive(request, before_segment=before)
    assert caught.value.exit_code == 75
    assert "preemption notice" in str(caught.value)
    assert "validated step 0" not in str(caught.value)


def test_a_straggler_of_two_ranks_is_named(drive: Drive, nano: Nano, tmp_path: Path) -> None:
    """Rank 1 computes 30 ms longer in each step: a notice says so, and nothing else happens."""
    request = nano("slow", training={"max_steps": 400, "segment_steps": 400}, parallel={"num_ranks": 2})
    result = drive(request, options=with_port(Slow(rank=1, delay_s=0.03)))
    assert result.faults == ()
    assert any("rank 1 is a straggler" in note.text for note in events_of(tmp_path, "slow", Noted))
