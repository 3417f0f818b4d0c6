"""Faults that stay: refusals, the same error in fresh processes, a loss scale at its floor. And what never counts as one."""

from typing import Any

import pytest

from mem_core.core.recovery.actions import GiveUp, Progress, Retry
from mem_core.core.recovery.failure_count import FailureCount
from mem_core.core.recovery.mem_orchestrator import MemOrchestrator
from mem_core.domain.errors import DataError, EnvironmentUnfit, MemError, NoProgress, PolicyRefused, RequestError
from mem_core.domain.segment import Evidence, Hung, NonFinite, OutOfMemory, Refusal, SaveFailed, SegmentFailure, WorkerError, WorkerLost
from mem_core.runtime.ranks.worker.classify import classify

LIMITS = MemOrchestrator(max_steps=250, segment_steps=100, max_failures_without_progress=3)


def limits(**changes: Any) -> MemOrchestrator:
    return LIMITS.model_copy(update=changes)


def error_of(action: object) -> MemError:
    assert isinstance(action, GiveUp), action
    return action.error


def lasting(phase: str = "start", batch: int = 0, words: str = "ValueError: no such kernel") -> WorkerError:
    return WorkerError(
        evidence=Evidence(rank=0, phase=phase, batch_index=batch, exception=words),  # type: ignore[arg-type]
        before_any_step=True,
    )


def after(*failures: SegmentFailure, has_stepped: bool = False, **values: Any) -> Progress:
    count = FailureCount()
    for failure in failures:
        count.failed(failure, counts=True)
    return Progress(
        applied_steps=0, validated_step=None, failures_without_progress=count.without_progress, same_batch_failures=count.same_batch,
        same_errors=count.same_error, same_error_batches=len(count.same_error_batches), has_stepped=has_stepped, **values,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [RequestError, PolicyRefused, EnvironmentUnfit])
def test_a_refusal_ends_at_once_as_itself(kind: type[MemError]) -> None:
    """Field, value, bound and remedy survive the way through plain values, which is how a rank's word is journaled."""
    refused = classify(kind("cannot", field="model.dtype", value=3, bound="1 to 2", remedy="Set 1."), 0, "start", 0)
    assert isinstance(refused, WorkerError)
    again = WorkerError.model_validate_json(refused.model_dump_json())
    error = error_of(LIMITS.next_action(after(again), again))
    assert type(error) is kind
    assert str(error) == "model.dtype: cannot (got 3); allowed: 1 to 2. Set 1."


def test_other_errors_of_mem_are_no_refusals() -> None:
    """A damaged cache shard is made again."""
    failure = classify(DataError("shard damaged", remedy="x"), 0, "start", 0, steps_done=False)
    assert isinstance(failure, WorkerError)
    assert failure.refusal is None
    assert Refusal.of(ValueError("x")) is None


@pytest.mark.parametrize("phase", ["start", "calibrate", "first_step", "forward", "backward", "step"])
def test_the_same_error_in_two_fresh_processes_before_any_step_ends(phase: str) -> None:
    """With its own words and exit 69; the first time it is tried again."""
    failure = lasting(phase)
    assert isinstance(LIMITS.next_action(after(failure), failure), Retry)
    error = error_of(LIMITS.next_action(after(failure, failure), failure))
    assert isinstance(error, EnvironmentUnfit)
    assert "no such kernel" in str(error)
    assert "samples" not in str(error)


def test_other_words_another_phase_or_a_kill_between_begin_anew() -> None:
    """Only the same thing twice in a row is one thing."""
    failure = lasting("forward")
    kill = WorkerLost(cause="SIGKILL", evidence=Evidence(rank=0, phase="forward", batch_index=0))
    for other in (lasting("forward", words="ValueError: else"), lasting("start"), kill):
        assert isinstance(LIMITS.next_action(after(failure, other, failure), failure), Retry)


def test_a_batch_is_the_suspect_once_another_one_was_done() -> None:
    """After that the old rule holds: the allowed restarts, then the batch and its samples."""
    failure = lasting("forward", batch=14)
    assert isinstance(LIMITS.next_action(after(failure, failure, has_stepped=True), failure), Retry)
    error = error_of(LIMITS.next_action(after(*[failure] * 4, has_stepped=True, sample_ids=(4, 2)), failure))
    assert isinstance(error, NoProgress)
    assert "samples [4, 2]" in str(error)


def test_where_batches_may_be_left_out_another_one_is_tried_first() -> None:
    """The same words at the next batch, too, are the environment's."""
    failure, orchestrator = lasting("forward"), limits(on_poisoned_batch="skip")
    skipped = orchestrator.next_action(after(failure, failure), failure)
    assert isinstance(skipped, Retry)
    assert skipped.skip_batch == 0
    following = lasting("forward", batch=1)
    assert isinstance(error_of(orchestrator.next_action(after(failure, failure, following), following)), EnvironmentUnfit)


def test_a_first_batch_that_kills_each_time_blames_no_sample() -> None:
    """Whatever kills at the first batch may be anything until another batch was done."""
    kill = WorkerLost(cause="SIGKILL", evidence=Evidence(rank=0, phase="forward", batch_index=0, last_lines=("Illegal instruction",)))
    error = error_of(LIMITS.next_action(after(*[kill] * 4, sample_ids=(4, 2)), kill))
    assert "samples" not in str(error)
    assert "Illegal instruction" in str(error), "what it said last stands in the message"


class InjectedError(RuntimeError):
    """Named as the drill's."""


class DistNetworkError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    "exc",
    [
        InjectedError("order 3 in forward"),
        DistNetworkError("x"),
        OSError(5, "Input/output error"),
        EOFError("the supervisor is gone"),
        ConnectionResetError("x"),
        RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"),
    ],
)
def test_what_may_pass_never_counts(exc: BaseException) -> None:
    """Injected faults, stores and peers."""
    failure = classify(exc, 0, "forward", 0, steps_done=False)
    assert isinstance(failure, WorkerError)
    assert not failure.before_any_step


def test_only_a_process_without_a_step_counts_and_never_over_a_checkpoint() -> None:
    """A restore that fails has the checkpoint as its suspect."""
    for phase, steps_done, expected in (("forward", False, True), ("forward", True, False), ("restore", False, False)):
        failure = classify(ValueError("x"), 0, phase, 0, steps_done=steps_done)
        assert isinstance(failure, WorkerError)
        assert failure.before_any_step == expected


@pytest.mark.parametrize(
    "failure",
    [
        WorkerLost(cause="SIGKILL", evidence=Evidence(rank=0, phase="start")),
        Hung(waited_s=3.0, evidence=Evidence(rank=0, phase="start")),
        OutOfMemory(memory="host", evidence=Evidence(rank=0, phase="calibrate")),
        SaveFailed(evidence=Evidence(phase="save", exception="OSError: disk full")),
        NonFinite(what="loss", batch_index=0, evidence=Evidence(rank=0, phase="step", batch_index=0)),
    ],
    ids=lambda failure: failure.kind,
)
def test_kills_hangs_memory_stores_and_numbers_are_tried_to_the_bound(failure: SegmentFailure) -> None:
    """Twice the same is no proof with these."""
    assert isinstance(LIMITS.next_action(after(failure, failure), failure), Retry)


# -- the loss scale -----------------------------------------------------------------------------------------------------------

FLOOR = NonFinite(
    what="loss_scale", batch_index=9, sample_ids=(4, 2),
    evidence=Evidence(rank=0, phase="step", batch_index=9, exception="overflow at 1; loss scale: 4 after batch 6, 2 after batch 7"),
)  # fmt: skip


@pytest.mark.parametrize("on_non_finite", ["retry", "skip", "lower_lr"])
def test_a_loss_scale_at_its_floor_gets_one_retry_and_then_advice_that_helps(on_non_finite: str) -> None:
    """Never samples, never `lower_lr`, which does nothing about it."""
    orchestrator = limits(on_non_finite=on_non_finite, on_poisoned_batch="skip")
    first = orchestrator.next_action(after(FLOOR, has_stepped=True), FLOOR)
    assert isinstance(first, Retry)
    assert (first.lower_lr, first.skip_batch) == (False, None)
    error = error_of(orchestrator.next_action(after(FLOOR, FLOOR, has_stepped=True), FLOOR))
    assert isinstance(error, NoProgress)
    for words in ("bfloat16", "training.learning_rate", "4 after batch 6, 2 after batch 7"):
        assert words in str(error)
    for words in ("samples [", "lower_lr", "on_poisoned_batch"):
        assert words not in str(error)


def test_advice_never_names_what_is_set_already() -> None:
    """`on_non_finite: lower_lr` is no way out for who has it."""
    loss = NonFinite(what="loss", batch_index=9, evidence=Evidence(rank=0, phase="step", batch_index=9))
    text = str(error_of(limits(on_non_finite="lower_lr").next_action(after(*[loss] * 4, has_stepped=True), loss)))
    assert "on_non_finite: skip" in text
    assert "lower_lr" not in text
