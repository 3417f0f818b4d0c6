"""The fold from journal to state: position, restarts, failures without progress, plan changes, decisions."""

from mem_core.core.run.fold import fold_state
from mem_core.domain.events import CheckpointRemoved, FaultMet, MemoryPlanChanged, PolicyDecided, SegmentEnded, SegmentStarted
from mem_core.domain.plan import CandidatePlan, Hyperparams, MemoryPlan, MemoryPlanChange, record_change
from mem_core.domain.policy import PolicyDecision
from mem_core.domain.segment import Evidence, Hung, NonFinite, SegmentInterrupted, WorkerLost
from mem_core.testing.synthetic_run import JournalBuilder


def lost(batch_index: int | None = None) -> WorkerLost:
    return WorkerLost(cause="SIGKILL", evidence=Evidence(rank=0, phase="forward", batch_index=batch_index))


def failed_segment(builder: JournalBuilder, from_step: int, until_step: int, failure: WorkerLost | Hung | NonFinite) -> None:
    builder.add(SegmentStarted(segment_index=from_step // 100, from_step=from_step, until_step=until_step))
    builder.add(SegmentEnded(segment_index=from_step // 100, outcome=failure), after_s=3)
    builder.add(FaultMet(kind=failure.kind, step=from_step))


def test_an_empty_journal_is_a_run_that_has_not_begun() -> None:
    state = fold_state([])
    assert (state.attempt, state.applied_steps, state.newest_validated_step, state.last_status) == (0, 0, None, "running")


def test_position_counts_applied_and_skipped_apart() -> None:
    state = fold_state(JournalBuilder().start().segment(0, 0, 100, skipped=3).segment(1, 100, 200, skipped=4).lines)
    assert (state.applied_steps, state.skipped_steps, state.batch_index) == (200, 4, 204)
    assert (state.tokens, state.newest_validated_step, state.newest_committed_step) == (1600, 200, 200)


def test_redone_steps_are_not_counted_twice() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100).segment(1, 100, 200, skipped=5)
    builder.start(resumed_step=100).segment(1, 100, 200, skipped=5)
    state = fold_state(builder.lines)
    assert (state.applied_steps, state.tokens, state.skipped_steps, state.highest_step, state.restarts) == (200, 1600, 5, 200, 1)


def test_going_back_restores_the_position_of_that_step() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100, skipped=1).segment(1, 100, 200, skipped=5).start(resumed_step=100)
    state = fold_state(builder.lines)
    assert (state.applied_steps, state.batch_index, state.skipped_steps, state.tokens, state.highest_step) == (100, 101, 1, 800, 200)


def test_a_kill_before_any_checkpoint_goes_back_to_the_start() -> None:
    builder = JournalBuilder().start()
    builder.add(SegmentStarted(segment_index=0, from_step=0, until_step=100)).start()
    state = fold_state(builder.lines)
    assert (state.applied_steps, state.restarts, state.kills_without_progress, state.failures_without_progress) == (0, 1, 1, 0)


def test_an_orderly_end_is_no_restart_and_starts_the_failure_count_anew() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    failed_segment(builder, 100, 200, lost())
    builder.end("failed", 79)
    assert fold_state(builder.lines).failures_without_progress == 1
    state = fold_state(builder.start(resumed_step=100).lines)
    assert (state.restarts, state.failures_without_progress, state.last_status) == (0, 0, "running")


def test_failures_count_until_the_validated_step_rises_above_every_earlier_one() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    failed_segment(builder, 100, 200, lost())
    failed_segment(builder, 100, 200, lost())
    builder.judge(100)
    assert fold_state(builder.lines).failures_without_progress == 2
    state = fold_state(builder.segment(1, 100, 200).lines)
    assert (state.failures_without_progress, state.restarts) == (0, 2)


def test_the_same_failure_at_the_same_batch_is_counted_in_a_row() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    failed_segment(builder, 100, 200, lost(150))
    failed_segment(builder, 100, 200, lost(150))
    repeated = fold_state(builder.lines).repeated_failure
    assert repeated is not None
    assert (repeated.kind, repeated.batch_index, repeated.count) == ("worker_lost", 150, 2)
    failed_segment(builder, 100, 200, Hung(waited_s=3, evidence=Evidence(batch_index=150)))
    other = fold_state(builder.lines).repeated_failure
    assert other is not None
    assert (other.kind, other.count) == ("hung", 1)


def test_a_batch_that_was_passed_is_no_longer_suspected() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    failed_segment(builder, 100, 200, lost(150))
    assert fold_state(builder.segment(1, 100, 200).lines).repeated_failure is None


def test_a_failure_raises_the_highest_step_by_what_had_been_done() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100, skipped=2)
    failed_segment(builder, 100, 200, lost(162))
    state = fold_state(builder.lines)
    assert (state.highest_step, state.applied_steps) == (160, 100)


def test_a_fault_without_going_back_keeps_the_steps() -> None:
    """A checkpoint that is damaged on disk is saved again while training goes on."""
    builder = JournalBuilder().start().segment(0, 0, 100).segment(1, 100, 200)
    builder.judge(200, valid=False).add(FaultMet(kind="checkpoint_rejected", step=100))
    builder.add(SegmentStarted(segment_index=2, from_step=200, until_step=300))
    state = fold_state(builder.lines)
    assert (state.applied_steps, state.tokens, state.newest_validated_step, state.newest_committed_step) == (200, 1600, 100, 100)


def test_a_run_that_ends_after_a_fault_stands_at_the_step_that_the_fault_named() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100).segment(1, 100, 200)
    builder.add(FaultMet(kind="non_finite", step=100)).end("failed", 79)
    assert fold_state(builder.lines).applied_steps == 100


def test_a_removed_checkpoint_is_no_resume_point() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100).segment(1, 100, 200)
    state = fold_state(builder.add(CheckpointRemoved(step=200, reason="quarantined: hash differs")).lines)
    assert (state.newest_validated_step, state.newest_committed_step) == (100, 100)


def test_an_interrupted_segment_moves_the_position() -> None:
    builder = JournalBuilder().start().segment(0, 0, 100)
    outcome = SegmentInterrupted(by="SIGTERM", to_step=137, batch_index=138, tokens=37 * 8)
    builder.add(SegmentStarted(segment_index=1, from_step=100, until_step=200), SegmentEnded(segment_index=1, outcome=outcome))
    state = fold_state(builder.end("interrupted", 75).start(resumed_step=137).segment(2, 137, 200, skipped=1).lines)
    assert (state.applied_steps, state.skipped_steps, state.tokens, state.restarts) == (200, 1, 1600, 0)


def test_plan_changes_fold_as_record_change_does() -> None:
    batches = (0, 40, 90, 90, 30, 35, 200)
    builder, expected = JournalBuilder().start(), ()
    for number, batch_index in enumerate(batches):
        change = MemoryPlanChange(batch_index=batch_index, plan=MemoryPlan(micro_batch_rows=number + 1), reason="watermark")
        builder.add(MemoryPlanChanged(change=change))
        expected = record_change(expected, change)
    assert fold_state(builder.lines).memory_plan_changes == expected
    assert [change.batch_index for change in expected] == [0, 30, 35, 200]


def test_the_last_decision_of_each_segment_is_kept() -> None:
    builder = JournalBuilder().start()
    for index, multiplier in ((0, 1.0), (1, 0.5), (1, 0.7)):
        applied = Hyperparams(lr_multiplier=multiplier)
        plan = CandidatePlan(
            segment_index=index,
            from_step=index * 100,
            until_step=index * 100 + 100,
            hyperparams=applied,
            memory=MemoryPlan(micro_batch_rows=1),
        )
        decision = PolicyDecision(allow=True, reason="ok", lane="cpu", applied_hyperparams=applied)
        builder.add(PolicyDecided(segment_index=index, plan=plan, decision=decision))
    decided = fold_state(builder.lines).decided
    assert [(one.segment_index, one.from_step, one.hyperparams.lr_multiplier) for one in decided] == [(0, 0, 1.0), (1, 100, 0.7)]
