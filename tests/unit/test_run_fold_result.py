"""The fold from journal to result: losses, faults, checkpoints, OOMs, goodput over attempts; total and linear."""

import math
import random
import time

import pytest

from mem_core.core.run.fold import RunFold, fold_result, fold_state
from mem_core.domain.environment import EnvironmentReport, MemoryBudget
from mem_core.domain.events import (
    CheckpointMirrored,
    CheckpointRemoved,
    DoctorReported,
    Evaluated,
    FaultMet,
    OomAbsorbed,
    Recovered,
    Resumed,
    SegmentEnded,
    SegmentStarted,
    TimeSpent,
)
from mem_core.domain.segment import Evidence, OutOfMemory, WorkerLost
from mem_core.testing.synthetic_run import JournalBuilder

OOM = OutOfMemory(memory="host", evidence=Evidence(batch_index=150, peak_bytes=9_999))
LOST = WorkerLost(cause="SIGKILL", evidence=Evidence(rank=1))


def failing(builder: JournalBuilder, outcome: OutOfMemory | WorkerLost) -> JournalBuilder:
    return builder.add(SegmentStarted(segment_index=1, from_step=100, until_step=200), SegmentEnded(segment_index=1, outcome=outcome))


def test_a_completed_run() -> None:
    report = EnvironmentReport(
        device="cpu",
        device_reason="no CUDA",
        dtype="float32",
        num_cores=2,
        threads_per_rank=1,
        versions={},
        memory=(
            MemoryBudget(kind="device", budget_bytes=1, binding_limit="none"),
            MemoryBudget(kind="host", budget_bytes=5_000, binding_limit="cgroup"),
        ),
        findings=(),
    )
    builder = JournalBuilder().start().add(DoctorReported(report=report)).segment(0, 0, 100).segment(1, 100, 200)
    builder.add(Evaluated(step=200, validation_loss=4.9)).end()
    result = fold_result(builder.lines, run_id="demo")
    assert (result.status, result.run_id, result.applied_steps, result.exit_code) == ("completed", "demo", 200, 0)
    assert (result.loss_first, result.loss_last, result.validation_loss) == (5.0, 4.8, 4.9)
    assert (result.trajectory_digest, result.weights_digest) == ("t200", "w200")
    assert (result.tokens, result.tokens_per_s) == (1600, 80.0)
    assert (result.memory.peak_bytes, result.memory.budget_bytes, result.memory.binding_limit) == (1200, 5_000, "cgroup")
    assert result.device == "cpu"
    assert result.goodput.fraction == 1.0


def test_the_digests_are_those_of_the_position_and_not_of_lost_work() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100).segment(1, 100, 200).start(resumed_step=100).end("interrupted", 75)
    result = fold_result(builder.lines)
    assert (result.applied_steps, result.trajectory_digest, result.weights_digest, result.loss_last) == (100, "t100", "w100", 4.9)


def test_faults_carry_their_recovery_and_kills_of_the_whole_run_are_among_them() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    failing(builder, LOST).add(FaultMet(kind="worker_lost", step=100, detail="rank 1"))
    builder.add(SegmentStarted(segment_index=1, from_step=100, until_step=200, try_number=2))
    builder.add(Recovered(kind="worker_lost", step=100, recovered_s=0.8)).start(resumed_step=100)
    result = fold_result(builder.lines)
    assert [(fault.kind, fault.step, fault.recovered_s) for fault in result.faults] == [
        ("worker_lost", 100, 0.8),
        ("run_killed", 100, None),
    ]
    assert result.restarts == 2


def test_a_failed_segment_that_nobody_named_is_still_a_fault() -> None:
    """The flow was killed, or gave up, between the failure and its `fault_met`."""
    result = fold_result(failing(JournalBuilder().start().segment(0, 0, 100), LOST).end("failed", 79, "no progress").lines)
    assert [(fault.kind, fault.step) for fault in result.faults] == [("worker_lost", 100)]
    assert (result.restarts, result.exit_code, result.message) == (0, 79, "no progress")


def test_a_recovery_of_an_unknown_kind_closes_the_latest_open_fault() -> None:
    builder = JournalBuilder().start().add(FaultMet(kind="hung", step=0), FaultMet(kind="worker_lost", step=0))
    result = fold_result(builder.add(Recovered(kind="something", step=0, recovered_s=1.5)).lines)
    assert [fault.recovered_s for fault in result.faults] == [None, 1.5]


def test_an_oom_that_was_survived_is_absorbed_and_one_that_ended_the_run_is_fatal() -> None:
    absorbed = JournalBuilder().start().add(OomAbsorbed(batch_index=3, memory="host", phase="forward")).segment(0, 0, 100)
    failing(absorbed, OOM).segment(1, 100, 200)
    result = fold_result(absorbed.lines)
    assert (result.ooms_absorbed, result.ooms_fatal, result.memory.peak_bytes) == (2, 0, 9_999)
    fatal = fold_result(failing(JournalBuilder().start().segment(0, 0, 100), OOM).end("failed", 78).lines)
    assert (fatal.ooms_absorbed, fatal.ooms_fatal) == (0, 1)


def test_an_oom_reported_as_absorbed_after_its_segment_counts_once() -> None:
    builder = failing(JournalBuilder().start().segment(0, 0, 100), OOM)
    builder.add(OomAbsorbed(batch_index=150, memory="host", phase="forward")).segment(1, 100, 200)
    assert fold_result(builder.lines).ooms_absorbed == 1


def test_checkpoints_by_fate() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100).segment(1, 100, 200).judge(200)
    builder.add(CheckpointRemoved(step=100, reason="rotation"))
    builder.commit(300).judge(300, valid=False).commit(300).judge(300, manifest="again")
    counts = fold_result(builder.lines).checkpoints
    assert (counts.written, counts.validated, counts.rejected, counts.kept) == (4, 3, 1, 2)


def test_time_between_attempts_is_restart_after_a_kill_and_nobodys_after_an_orderly_end() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    builder.add(SegmentStarted(segment_index=1, from_step=100, until_step=200), after_s=4)
    builder.start(resumed_step=100, after_s=6).segment(1, 100, 200).end("interrupted", 75)
    builder.start(resumed_step=200, after_s=100).segment(2, 200, 300).end()
    goodput = fold_result(builder.lines).goodput
    assert goodput.seconds == pytest.approx({"productive": 30, "restart": 10, "between_attempts": 100})
    assert sum(goodput.seconds.values()) == pytest.approx(builder.lines[-1].time_unix_s - builder.lines[0].time_unix_s, rel=0.01)
    assert goodput.fraction == pytest.approx(30 / 40)


def test_hours_between_two_commands_are_outside_the_fraction() -> None:
    """However long a run waits for its user, and also where the last command had been killed: only work may have been lost then."""
    waited = JournalBuilder().start().segment(0, 0, 100).end("interrupted", 75)
    waited.start(resumed_step=100, after_s=9 * 3_600).segment(1, 100, 200).end()
    goodput = fold_result(waited.lines).goodput
    assert goodput.seconds == pytest.approx({"productive": 20, "between_attempts": 9 * 3_600})
    assert goodput.fraction == pytest.approx(1.0)
    assert goodput.lived_s == pytest.approx(20)
    killed = JournalBuilder().start().segment(0, 0, 100)
    killed.start(resumed_step=100, after_s=9 * 3_600).segment(1, 100, 200).end()
    goodput = fold_result(killed.lines).goodput
    assert goodput.seconds == pytest.approx({"productive": 20, "restart": 10, "between_attempts": 9 * 3_600 - 10})
    assert goodput.fraction == pytest.approx(2 / 3)


def test_a_killed_attempt_lived_until_its_last_line() -> None:
    """What it said is proof, whatever was measured before."""
    builder = JournalBuilder().start().segment(0, 0, 100)
    builder.add(SegmentStarted(segment_index=1, from_step=100, until_step=200), after_s=40)
    builder.start(resumed_step=100, after_s=500).segment(1, 100, 200).end()
    assert fold_result(builder.lines).goodput.seconds == pytest.approx({"productive": 20, "restart": 40, "between_attempts": 500})


def test_start_up_before_the_first_line_of_an_attempt_does_not_count_twice() -> None:
    """A ledger that began 5 s before its `attempt_started` line takes them out of the hole before it."""
    builder = JournalBuilder().start().segment(0, 0, 100).start(resumed_step=100, after_s=8)
    builder.add(TimeSpent(seconds={"start": 5.0, "productive": 10.0}), after_s=10)
    assert fold_result(builder.lines).goodput.seconds == pytest.approx({"productive": 20, "start": 5, "restart": 3})


def test_a_clock_that_jumps_inside_an_attempt_adds_no_seconds() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    builder.now_s += 3_600
    builder.segment(1, 100, 200)
    builder.now_s -= 7_200
    assert fold_result(builder.segment(2, 200, 300).lines).goodput.seconds == {"productive": 30}


def test_seconds_that_are_no_numbers_are_left_out() -> None:
    builder = JournalBuilder().start().add(TimeSpent(seconds={"productive": math.nan, "idle": -4.0, "data": math.inf, "restore": 2.0}))
    assert fold_result(builder.lines).goodput.seconds == {"restore": 2.0}


def test_any_order_of_lines_folds_and_taking_lines_one_at_a_time_is_the_same() -> None:
    builder = JournalBuilder().start()
    for index in range(5):
        builder.segment(index, index * 100, index * 100 + 100)
        failing(builder, OOM if index % 2 else LOST).add(FaultMet(kind="x", step=index * 100))
    builder.end("failed", 79).start(resumed_step=300).segment(3, 300, 400).end()
    rng = random.Random(7)
    for _ in range(200):
        lines = rng.sample(builder.lines, k=rng.randrange(len(builder.lines)))
        fold = RunFold()
        for line in lines:
            fold.add(line)
        state = fold.state()
        assert fold.result() == fold_result(lines)
        assert state.batch_index == state.applied_steps + state.skipped_steps
        assert state.skipped_steps >= 0
        assert state.tokens >= 0


def test_the_fold_is_linear() -> None:
    """Ten times the lines take about ten times as long; a quadratic fold would take a hundred times."""
    durations_s: list[float] = []
    for num_segments in (300, 3_000):
        builder = JournalBuilder().start()
        for index in range(num_segments):
            builder.segment(index, index * 100, index * 100 + 100)
            failing(builder, LOST).add(FaultMet(kind="worker_lost", step=index * 100))
        began_s = time.process_time()  # of this process alone: a busy machine makes nothing quadratic
        assert fold_state(builder.lines).applied_steps == 100
        durations_s.append(time.process_time() - began_s)
    assert durations_s[1] < 40 * durations_s[0]


@pytest.mark.parametrize(
    ("copies", "at_step", "missing", "words"),
    [
        ([], None, (), None),
        ([(100, ""), (200, "")], 200, (), "mirror at 200 of 200"),
        ([(100, ""), (200, "away")], 100, (200,), "mirror at 100 of 200 (away)"),
        ([(100, "away"), (200, "away")], None, (100, 200), "mirror at none of 200 (away)"),
        ([(100, "away"), (200, "")], 200, (), "mirror at 200 of 200"),
    ],
)
def test_how_far_the_mirror_is(copies: list[tuple[int, str]], at_step: int | None, missing: tuple[int, ...], words: str | None) -> None:
    """What was passed over matters to nobody once something newer has its copy."""
    builder = JournalBuilder().start().segment(0, 0, 100).segment(1, 100, 200)
    builder.add(*(CheckpointMirrored(step=step, url="s3://b", problem=problem) for step, problem in copies))
    mirror = fold_result(builder.lines).mirror
    assert (mirror and str(mirror)) == words
    if mirror is not None:
        assert (mirror.at_step, mirror.missing_steps, mirror.behind) == (at_step, missing, bool(missing))


def test_a_journal_that_lost_what_led_to_a_checkpoint_takes_its_word() -> None:
    """Only the checkpoint is left: what it stands for is done, and its tokens took no time that anybody measured."""
    resumed = Resumed(step=70, batch_index=72, tokens=560, weights_digest="w70", trajectory_digest="t70")
    result = fold_result(JournalBuilder().start().add(resumed).segment(7, 70, 80, skipped=2).end().lines)
    assert (result.applied_steps, result.skipped_steps, result.tokens, result.tokens_per_s) == (80, 2, 640, 8.0)
    only = fold_result(JournalBuilder().start().add(resumed).end().lines)
    assert (only.applied_steps, only.trajectory_digest, only.weights_digest) == (70, "t70", "w70")


def test_a_resume_in_a_whole_journal_changes_nothing_but_the_position() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100).segment(1, 100, 200).start()
    builder.add(Resumed(step=100, batch_index=100, tokens=800, weights_digest="w100", trajectory_digest="t100"))
    result = fold_result(builder.segment(1, 100, 200).end().lines)
    assert (result.applied_steps, result.tokens, result.tokens_per_s, result.weights_digest) == (200, 1600, 80.0, "w200")


def test_tries_that_a_bad_checkpoint_cost_are_not_held_against_the_run() -> None:
    """They were failures without progress until the checkpoint was condemned."""
    builder = JournalBuilder().start().segment(0, 0, 100).segment(1, 100, 200)
    loading = WorkerLost(cause="SIGKILL", evidence=Evidence(phase="restore", restoring_step=200))
    for outcome in (loading, LOST, loading):
        builder.add(SegmentEnded(segment_index=2, outcome=outcome))
    assert fold_state(builder.lines).failures_without_progress == 3
    assert fold_state(builder.judge(200, valid=False).lines).failures_without_progress == 1
