"""What follows an outcome: every branch of the one pure function."""

from typing import Any

import pytest

from mem_core.core.recovery.actions import Action, Finish, GiveUp, Pause, Progress, Retry, Train
from mem_core.core.recovery.failure_count import FailureCount
from mem_core.core.recovery.mem_orchestrator import BACK_OFF_S, MemOrchestrator
from mem_core.domain.errors import InternalError, MemError, MemoryExhausted, NoProgress, NoValidCheckpoint, StoreUnavailable
from mem_core.domain.segment import (
    Evidence,
    Hung,
    NonFinite,
    OutOfMemory,
    SaveFailed,
    SegmentCompleted,
    SegmentFailure,
    SegmentInterrupted,
    SegmentOutcome,
    WorkerError,
    WorkerLost,
)

LIMITS = MemOrchestrator(max_steps=250, segment_steps=100, max_failures_without_progress=3)
AT_STEP = Evidence(rank=0, phase="step", batch_index=17, exception="ValueError: x")
FAILURES: tuple[SegmentFailure, ...] = (
    WorkerLost(cause="SIGKILL", evidence=AT_STEP),
    Hung(waited_s=3.0, evidence=AT_STEP),
    NonFinite(what="loss", batch_index=17, sample_ids=(4, 2), evidence=AT_STEP),
    WorkerError(evidence=AT_STEP),
    SaveFailed(evidence=Evidence(phase="save", exception="OSError: disk full")),
    OutOfMemory(memory="host", evidence=AT_STEP),
)


def next_action(where: Progress, outcome: SegmentOutcome | None, orchestrator: MemOrchestrator) -> Action:
    return orchestrator.next_action(where, outcome)


def limits(**changes: Any) -> MemOrchestrator:
    return LIMITS.model_copy(update=changes)


def progress(**values: Any) -> Progress:
    return Progress(**{"applied_steps": 0, "validated_step": 100, "failures_without_progress": 1, **values})


def error_of(action: object) -> MemError:
    assert isinstance(action, GiveUp)
    return action.error


def completed(to_step: int) -> SegmentCompleted:
    return SegmentCompleted(
        from_step=0, to_step=to_step, batch_index=to_step, loss_first=2, loss_last=1, tokens=1, duration_s=1, trajectory_digest="d"
    )


@pytest.mark.parametrize(("applied", "index", "until"), [(0, 0, 100), (100, 1, 200), (130, 1, 200), (200, 2, 250), (249, 2, 250)])
def test_the_next_segment_ends_at_a_multiple_or_at_the_end(applied: int, index: int, until: int) -> None:
    """Also from the middle of a segment, where a stop or a rollback left the run."""
    for outcome in (None, completed(applied)):
        assert next_action(progress(applied_steps=applied), outcome, LIMITS) == Train(index, applied, until)


@pytest.mark.parametrize("applied", [250, 251])
def test_all_steps_applied_is_the_end(applied: int) -> None:
    """Never before (I3)."""
    assert next_action(progress(applied_steps=applied), None, LIMITS) == Finish()


def test_a_request_to_stop_pauses() -> None:
    """It is no failure and costs no try."""
    assert next_action(progress(), SegmentInterrupted(by="SIGTERM", to_step=40), LIMITS) == Pause("SIGTERM")


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.kind)
def test_every_failure_is_tried_again_at_once_and_then_with_growing_delays(failure: SegmentFailure) -> None:
    """Bounded: the try after the last allowed one gives up."""
    for tries in (1, 2, 3):
        action = next_action(progress(failures_without_progress=tries), failure, LIMITS)
        assert isinstance(action, Retry)
        assert action.delay_s == (0.0 if tries == 1 else BACK_OFF_S[tries - 1])
        assert action.skip_batch is None
        assert not action.lower_lr
        assert action.shrink == isinstance(failure, OutOfMemory)
    error_of(next_action(progress(failures_without_progress=4), failure, LIMITS))


def test_delays_stop_growing() -> None:
    """However many restarts the user allows."""
    action = next_action(progress(failures_without_progress=50), FAILURES[0], limits(max_failures_without_progress=100))
    assert isinstance(action, Retry)
    assert action.delay_s == BACK_OFF_S[-1]


def test_no_progress_names_cause_step_and_remedy() -> None:
    """Exit 79 for whatever has no code of its own."""
    error = error_of(next_action(progress(failures_without_progress=4), FAILURES[0], LIMITS))
    assert isinstance(error, NoProgress)
    for words in ("SIGKILL", "batch 17", "validated step 100", "3 restarts", "same command"):
        assert words in str(error)


def test_a_store_that_stays_away_ends_as_such() -> None:
    """Exit 73."""
    error = error_of(next_action(progress(failures_without_progress=4), FAILURES[4], LIMITS))
    assert isinstance(error, StoreUnavailable)
    assert "disk full" in str(error)


def test_workers_that_never_start_are_a_bug_of_ours() -> None:
    """Exit 70."""
    failure = WorkerError(evidence=Evidence(rank=0, phase="start", exception="ImportError: x"))
    assert isinstance(error_of(next_action(progress(failures_without_progress=4), failure, LIMITS)), InternalError)


# -- memory -------------------------------------------------------------------------------------------------------------------


def test_fixed_memory_fails_at_the_first_oom() -> None:
    """Exit 78, in one attempt."""
    error = error_of(next_action(progress(), FAILURES[5], limits(memory_mode="fixed")))
    assert isinstance(error, MemoryExhausted)
    assert "memory.mode is fixed" in str(error)


def test_no_rung_left_is_exhausted_at_the_second_oom() -> None:
    """The first may have been somebody else's memory."""
    assert isinstance(next_action(progress(can_shrink=False), FAILURES[5], LIMITS), Retry)
    again = next_action(progress(can_shrink=False, failures_without_progress=2, same_batch_failures=2), FAILURES[5], LIMITS)
    assert isinstance(error_of(again), MemoryExhausted)


def test_an_oom_after_another_kind_of_failure_is_tried_again() -> None:
    """A worker was lost, and the load that follows does not fit: its own first time."""
    assert isinstance(next_action(progress(can_shrink=False, failures_without_progress=2), FAILURES[5], LIMITS), Retry)


# -- a poisoned batch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [FAILURES[0], FAILURES[2], FAILURES[3]], ids=lambda failure: failure.kind)
def test_a_batch_that_fails_again_is_skipped_only_where_the_user_allows_it(failure: SegmentFailure) -> None:
    """Twice the same kind at the same batch."""
    twice = progress(failures_without_progress=2, same_batch_failures=2, sample_ids=(4, 2))
    allowed = next_action(twice, failure, limits(on_poisoned_batch="skip"))
    assert isinstance(allowed, Retry)
    assert allowed.skip_batch == 17
    forbidden = next_action(twice, failure, LIMITS)
    assert isinstance(forbidden, Retry)
    assert forbidden.skip_batch is None


@pytest.mark.parametrize("failure", [FAILURES[1], FAILURES[4]], ids=lambda failure: failure.kind)
def test_a_hang_or_a_failed_save_never_blames_the_batch(failure: SegmentFailure) -> None:
    """Their cause lies elsewhere."""
    action = next_action(progress(same_batch_failures=3), failure, limits(on_poisoned_batch="skip", on_non_finite="skip"))
    assert isinstance(action, Retry)
    assert action.skip_batch is None


def test_a_batch_that_fails_once_is_not_a_suspect() -> None:
    """Transient faults are far more common."""
    action = next_action(progress(same_batch_failures=1), FAILURES[3], limits(on_poisoned_batch="skip"))
    assert isinstance(action, Retry)
    assert action.skip_batch is None


def test_a_poisoned_batch_is_reported_by_its_samples() -> None:
    """What a person needs to look at, and the choice there is."""
    action = next_action(progress(failures_without_progress=4, same_batch_failures=4, sample_ids=(9, 8)), FAILURES[3], LIMITS)
    for words in ("Batch 17 failed each time", "[9, 8]", "on_poisoned_batch: skip"):
        assert words in str(error_of(action))


def test_skipping_is_capped() -> None:
    """Data that is bad all through must not be trained through in silence."""
    full = progress(same_batch_failures=2, skipped_batches=5, sample_ids=(1,))
    error = error_of(next_action(full, FAILURES[3], limits(on_poisoned_batch="skip", max_skipped_batches=5)))
    assert "5 batches have been skipped" in str(error)


# -- numbers that are not finite ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["loss", "gradient", "loss_spike"])
def test_a_non_finite_batch_is_skipped_at_once_where_asked(what: str) -> None:
    """No second try: the user knows the data."""
    action = next_action(progress(), NonFinite(what=what, batch_index=17), limits(on_non_finite="skip"))  # type: ignore[arg-type]
    assert isinstance(action, Retry)
    assert action.skip_batch == 17


def test_non_finite_weights_roll_back_and_blame_no_batch() -> None:
    """The checkpoint's step is not a batch."""
    for choice in ("skip", "lower_lr", "retry"):
        action = next_action(progress(same_batch_failures=3), NonFinite(what="weights", batch_index=100), limits(on_non_finite=choice))
        assert isinstance(action, Retry)
        assert action.skip_batch is None
        assert not action.lower_lr


def test_the_learning_rate_is_lowered_where_asked() -> None:
    """Through the policy engine; what follows is its decision."""
    action = next_action(progress(), FAILURES[2], limits(on_non_finite="lower_lr"))
    assert isinstance(action, Retry)
    assert action.lower_lr
    other = next_action(progress(), FAILURES[3], limits(on_non_finite="lower_lr"))
    assert isinstance(other, Retry)
    assert not other.lower_lr


def test_fail_means_at_once_and_names_the_samples() -> None:
    """For those who would rather look first."""
    error = error_of(next_action(progress(), FAILURES[2], limits(on_non_finite="fail")))
    assert "samples [4, 2]" in str(error)


def test_memory_in_pieces_is_tried_again_with_the_same_micro_batch_and_then_with_less() -> None:
    """Fragmentation: once a fresh process with another allocator, then the ladder; also where adaptation is off."""
    failure = OutOfMemory(memory="device", evidence=AT_STEP)
    for orchestrator in (LIMITS, limits(memory_mode="fixed")):
        action = next_action(progress(can_defragment=True, can_shrink=False, same_batch_failures=2), failure, orchestrator)
        assert isinstance(action, Retry)
        assert (action.shrink, action.defragment) == (False, True)
    again = next_action(progress(failures_without_progress=2), failure, LIMITS)
    assert isinstance(again, Retry)
    assert (again.shrink, again.defragment) == (True, False)


# -- a checkpoint that cannot be loaded ----------------------------------------------------------------------------------------

LOADING = Evidence(rank=0, phase="restore", restoring_step=30, exception="KeyError: 'ds_config'")
UNLOADED: tuple[tuple[SegmentFailure, int], ...] = (
    (WorkerError(evidence=LOADING), 2),
    (WorkerLost(cause="SIGKILL", evidence=LOADING), 3),
    (Hung(waited_s=3.0, evidence=LOADING), 3),
    (OutOfMemory(memory="host", evidence=LOADING), 3),
)


@pytest.mark.parametrize(("failure", "bound"), UNLOADED, ids=lambda value: getattr(value, "kind", ""))
def test_a_checkpoint_that_fails_to_load_again_and_again_gives_way_to_an_older_one(failure: SegmentFailure, bound: int) -> None:
    """An error once more; what comes from outside twice more. The bound on restarts does not count here: checkpoints are few."""
    for loads in range(1, bound + 1):
        action = next_action(progress(failed_loads=loads, can_fall_back=True, failures_without_progress=50), failure, LIMITS)
        assert isinstance(action, Retry)
        assert action.set_aside_step == (30 if loads == bound else None)
        assert not action.shrink


def test_where_no_older_one_is_left_an_error_is_no_valid_checkpoint() -> None:
    """Exit 74, with those that were tried, and nothing moved: other versions of the libraries look the same."""
    failure = WorkerError(evidence=LOADING)
    assert isinstance(next_action(progress(failed_loads=1), failure, LIMITS), Retry)
    error = error_of(next_action(progress(failed_loads=2, passed_over=(40, 50)), failure, LIMITS))
    assert isinstance(error, NoValidCheckpoint)
    for words in ("step 30", "steps 40, 50", "ds_config", "Nothing was moved"):
        assert words in str(error)


def test_a_death_while_the_only_checkpoint_loads_is_bounded_as_any_other() -> None:
    """It says nothing against the checkpoint."""
    failure = WorkerLost(cause="SIGKILL", evidence=LOADING)
    assert isinstance(next_action(progress(failed_loads=3, failures_without_progress=3), failure, LIMITS), Retry)
    assert isinstance(error_of(next_action(progress(failed_loads=4, failures_without_progress=4), failure, LIMITS)), NoProgress)


def test_failed_loads_are_counted_in_a_row_and_forgiven_once_passed_over() -> None:
    """A load that went well in between begins the count anew; what a bad checkpoint cost is not held against the run."""
    count = FailureCount()
    for failure in (WorkerError(evidence=LOADING), FAILURES[0], WorkerError(evidence=LOADING), WorkerError(evidence=LOADING)):
        count.failed(failure, counts=True)
    assert (count.without_progress, count.loads) == (4, {30: 2})
    count.passed_over(30)
    assert (count.without_progress, count.loads) == (2, {})
