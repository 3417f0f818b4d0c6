"""What of a run can be trained again and how: the line of commits, what is drawn, what a part ran with, how steps are compared. Pure."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mem_core.core.audit.comparison import compare_steps
from mem_core.core.audit.course import Piece, course_of, plan_changes_within
from mem_core.core.audit.line import Commit, Told, key_of, told_by
from mem_core.core.audit.machines import machine_notes
from mem_core.core.audit.stretches import coverage_of, drawn, not_named, out_of_reach, stretches_of
from mem_core.core.run.reshard import shape_note
from mem_core.domain.checkpoint import CheckpointVerdict, TrainingPosition
from mem_core.domain.events import (
    BatchSkipped,
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointSealed,
    Event,
    Forked,
    JournalLine,
    Noted,
    Resumed,
    SegmentEnded,
)
from mem_core.domain.plan import Hyperparams, MemoryPlan, MemoryPlanChange
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.results.audit import AuditedOn
from mem_core.domain.results.origin import ForkOrigin
from mem_core.domain.segment import SegmentCompleted
from mem_core.infrastructure.telemetry.metrics import Columns

LOW, HIGH = Hyperparams(lr_multiplier=0.5), Hyperparams(lr_multiplier=2.0)


def lines(events: Iterable[Event], attempt: int = 1) -> list[JournalLine]:
    return [
        JournalLine(sequence=number, time_unix_s=1.0, attempt=attempt, previous_sha256="0" * 64, event=event)
        for number, event in enumerate(events)
    ]


def committed(step: int, word: str = "") -> CheckpointCommitted:
    return CheckpointCommitted(step=step, size_bytes=1, duration_s=0.0, weights_digest=f"w{step}{word}", trajectory_digest=f"t{step}{word}")


def judged(step: int, *, valid: bool) -> CheckpointJudged:
    return CheckpointJudged(verdict=CheckpointVerdict(step=step, level="integrity", valid=valid, manifest_sha256="0" * 64))


def ended(from_step: int, to_step: int, loss: float) -> SegmentEnded:
    outcome = SegmentCompleted(
        from_step=from_step, to_step=to_step, batch_index=to_step, loss_first=9.0, loss_last=loss, tokens=1, duration_s=1.0,
        trajectory_digest="",
    )  # fmt: skip
    return SegmentEnded(segment_index=0, outcome=outcome)


def told(*steps: int, first_step: int = 0, reshaped: bool = False) -> Told:
    commits = tuple(Commit(step, f"w{step}", f"t{step}", 1) for step in steps)
    return Told(first_step=first_step, commits=commits, reshaped=reshaped)


def test_what_was_done_again_counts_and_what_was_lost_does_not() -> None:
    """Back to 10 after 30: the commits beyond are those of the second time."""
    first = [committed(10), committed(20), committed(30)]
    again = [Resumed(step=10, batch_index=10, weights_digest="w10", trajectory_digest="t10"), committed(20, "b")]
    read = told_by(lines(first + again))
    assert [(commit.step, commit.weights_digest) for commit in read.commits] == [(10, "w10"), (20, "w20b")]


def test_a_condemned_commit_is_passed_over_and_one_that_died_unsaid_is_known_by_who_took_it_up() -> None:
    sealed = CheckpointSealed(step=30, manifest_sha256="m")
    events = [*lines([committed(10), committed(20), judged(20, valid=False), sealed])]
    events += lines([Resumed(step=30, batch_index=30, weights_digest="w30", trajectory_digest="t30")], attempt=2)
    assert [(commit.step, commit.weights_digest, commit.attempt) for commit in told_by(events).commits] == [(10, "w10", 1), (30, "w30", 1)]


def test_losses_of_steps_that_were_lost_are_forgotten() -> None:
    read = told_by(lines([ended(0, 10, 5.0), ended(10, 20, 4.0), ended(20, 30, 3.0), ended(10, 20, 4.5)]))
    assert read.losses == {10: 5.0, 20: 4.5}


def test_a_fork_begins_where_it_was_forked_and_a_note_tells_of_another_shape() -> None:
    origin = ForkOrigin(run_id="a", step=40)
    note = Noted(text=shape_note(RuntimeRequest.model_validate({"run_id": "a"})))
    read = told_by(lines([Forked(origin=origin), BatchSkipped(batch_index=7), note, Noted(text="the run goes on")]))
    assert (read.first_step, read.left_out, read.reshaped) == (40, frozenset({7}), True)
    assert not told_by(lines([Noted(text="anything else")])).reshaped


def spans(read: Told, *kept: int) -> list[tuple[int, int]]:
    return [(stretch.from_step, stretch.to_step) for stretch in stretches_of(read, kept)]


def test_a_stretch_goes_from_what_is_kept_to_the_next_commit() -> None:
    assert spans(told(10, 20, 30, 40), 20, 40) == [(0, 10), (20, 30)]
    assert spans(told(10, 20, 30), 15) == [(0, 10)], "what the journal does not name is not begun with"
    assert not_named(told(10, 20, 30), (15, 20)) == (15,)
    assert spans(told(50, 60, first_step=40), 50) == [(50, 60)], "a fork did not begin with fresh weights"
    assert spans(told(10, 20, reshaped=True), 10) == [(10, 20)], "nothing says in which shape it began"


def test_what_is_out_of_reach_is_named_with_why() -> None:
    read = told(10, 20, 30, 40)
    (gap, last) = out_of_reach(read, stretches_of(read, (20,)), 40)
    assert gap.startswith("steps 11 to 20: no proven checkpoint")
    assert last.startswith("steps 31 to 40: no proven checkpoint")
    beyond = out_of_reach(read, stretches_of(read, (20,))[:1], 20)
    assert beyond[-1].startswith("steps 11 to 40: no checkpoint after them")
    other = told(10, 20, reshaped=True)
    assert "another number of ranks" in out_of_reach(other, stretches_of(other, (10,)), 20)[0]
    many = told(*range(10, 400, 10))
    words = out_of_reach(many, stretches_of(many, range(20, 400, 20)), 400)
    assert len(words) == 7
    assert words[-1] == "130 more steps in 13 other places"


@given(
    st.sets(st.integers(1, 200), min_size=1, max_size=30), st.sets(st.integers(1, 200), max_size=30), st.integers(1, 40), st.integers(0, 99)
)
def test_what_is_drawn_is_a_part_of_what_there_is_and_the_same_each_time(steps: set[int], kept: set[int], number: int, seed: int) -> None:
    read = told(*sorted(steps))
    possible = stretches_of(read, kept)
    chosen = drawn(possible, number, seed)
    assert chosen == drawn(possible, number, seed)
    assert len(set(chosen)) == len(chosen) == min(number, len(possible))
    assert list(chosen) == [stretch for stretch in possible if stretch in chosen], "ascending"
    covered = coverage_of(read, possible, chosen)
    assert 0 < covered.redone_steps <= covered.possible_steps <= covered.committed_steps == max(steps)
    assert sum(until - first for first, until in spans(read, *kept)) == covered.possible_steps


def test_every_stretch_is_drawn_by_some_seed() -> None:
    possible = stretches_of(told(10, 20, 30, 40), (10, 20, 30))
    assert {drawn(possible, 1, seed)[0].from_step for seed in range(40)} == {0, 10, 20, 30}


def position(step: int, batch: int, **values: object) -> TrainingPosition:
    return TrainingPosition.model_validate({"applied_steps": step, "batch_index": batch, **values})


def test_values_change_where_the_run_changed_them_and_left_out_batches_do_not_count() -> None:
    """Batches 12 and 15 were passed over; from batch 14 on the rate was doubled: 4 applied steps are batches 10, 11, 13 | 14."""
    later = position(30, 32, skipped_batches=(12, 15), hyperparams_history=((0, LOW), (14, HIGH)))
    course = course_of(position(10, 10), 14, later, {12, 15, 99})
    assert course.pieces == (Piece(13, LOW), Piece(14, HIGH))
    assert (course.end_batch, course.left_out) == (15, (12,))
    assert course_of(position(14, 15), 16, later, {12, 15}).left_out == (15,)


def test_a_change_at_the_first_batch_is_no_piece_of_its_own() -> None:
    later = position(30, 30, hyperparams_history=((0, LOW), (10, HIGH), (20, LOW)))
    assert course_of(position(10, 10), 20, later, ()).pieces == (Piece(20, HIGH),)
    assert course_of(position(0, 0), 10, position(10, 10, hyperparams=HIGH), ()).pieces == (Piece(10, HIGH),)


def test_a_skipped_update_that_the_engine_saw_is_no_batch_that_is_left_out() -> None:
    """float16 skips updates while it looks for its loss scale: the same will be skipped again by itself."""
    course = course_of(position(0, 0), 3, position(10, 12, skipped_batches=(0, 1)), ())
    assert (course.end_batch, course.left_out) == (5, ())


def test_plan_changes_of_other_stretches_do_not_count() -> None:
    plan = MemoryPlan(micro_batch_rows=1)
    changes = tuple(MemoryPlanChange(batch_index=index, plan=plan, reason="x") for index in (5, 10, 19, 20))
    assert plan_changes_within(position(30, 30, memory_plan_changes=changes), 10, 20) == 2


def columns(first: int, losses: list[float], norm: float = 1.0) -> Columns:
    number = len(losses)
    rows = np.arange(first, first + number)
    return {
        "batch_index": rows, "step": rows + 1, "loss": np.array(losses), "grad_norm": np.full(number, norm), "lr": np.full(number, 1e-3),
        "tokens": np.full(number, 7), "micro_batches": np.full(number, 2), "step_s": np.random.default_rng(0).random(number),
        "peak_bytes": np.arange(number),
    }  # fmt: skip


def test_every_number_of_a_step_counts_to_the_bit_and_the_machine_s_do_not() -> None:
    recorded, redone = columns(0, [3.0, 2.0, 1.0, 0.5]), columns(1, [2.0, 1.0])
    redone["step_s"], redone["peak_bytes"] = redone["step_s"] + 1, redone["peak_bytes"] + 1
    same = compare_steps(recorded, redone, {3: 1.0, 9: 4.0})
    assert (same.num_steps, same.reasons, same.distance.loss) == (2, (), 0.0)
    redone["loss"][1] = np.nextafter(1.0, 2.0)
    redone["micro_batches"][0] = 3
    apart = compare_steps(recorded, redone, {3: 1.0})
    assert apart.reasons == (
        "loss of step 3 is 1.0000000000000002, recorded 1.0",
        "number of micro-batches of step 2 is 3.0, recorded 2.0",
        "loss of step 3 is 1.0000000000000002, the journal says 1.0",
    )
    assert apart.distance.loss == pytest.approx(2.2e-16, rel=0.1)


def test_norms_that_no_engine_gives_are_the_same_and_steps_without_a_record_are_not_compared() -> None:
    missing = float("nan")
    same = compare_steps(columns(0, [3.0, 2.0], missing), columns(0, [3.0, 2.0], missing), {})
    assert (same.reasons, same.distance.grad_norm) == ((), None)
    nothing = compare_steps(columns(50, [3.0]), columns(0, [3.0]), {})
    assert (nothing.num_steps, nothing.reasons, nothing.distance.loss) == (0, (), None)
    assert compare_steps(columns(0, [3.0], 1.0), columns(0, [3.0], missing), {}).reasons != ()


def test_many_differences_are_counted_and_not_listed() -> None:
    apart = compare_steps(columns(0, [1.0] * 9), columns(0, [2.0] * 9), {})
    assert len(apart.reasons) == 4
    assert apart.reasons[-1] == "loss of 6 more steps"


def test_another_machine_is_said_once() -> None:
    here = AuditedOn(cpu="A (avx2)", versions={"torch": "2", "prefect": "3"})
    assert machine_notes(here, [here, here]) == ()
    other = AuditedOn(cpu="B", versions={"torch": "1", "prefect": "1"})
    assert machine_notes(here, [other, other]) == ("trained with torch 1, audited with 2", "trained on B, audited on A (avx2)")
    assert machine_notes(here, [AuditedOn()]) == ("the run did not record on which CPU it was trained",)


def test_values_are_the_same_only_if_every_one_is() -> None:
    assert key_of(LOW) == key_of(Hyperparams(lr_multiplier=0.5)) != key_of(HIGH)
