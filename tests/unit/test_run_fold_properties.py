"""The fold against a plain model: whatever is lost and done again, what counts is what an undisturbed run would count."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mem_core.core.run.fold import fold_result, fold_state
from mem_core.domain.events import FaultMet, SegmentEnded, SegmentStarted
from mem_core.domain.segment import Evidence, WorkerLost
from mem_core.testing.synthetic_run import JournalBuilder

STEPS = 10
moves = st.lists(st.sampled_from(["segment", "fail", "kill", "kill_and_lose", "stop"]), max_size=40)


def play(history: list[str]) -> tuple[JournalBuilder, int, int]:
    """A journal of these moves; returns it with the number of kills and of failures that were followed by a restart."""
    builder, step, kills, failures = JournalBuilder().start(), 0, 0, 0
    for move in [*history, "segment"]:
        if move == "segment":
            builder.segment(step // STEPS, step, step + STEPS)
            step += STEPS
        elif move == "fail":
            builder.add(SegmentStarted(segment_index=step // STEPS, from_step=step, until_step=step + STEPS))
            builder.add(SegmentEnded(segment_index=step // STEPS, outcome=WorkerLost(cause="SIGKILL", evidence=Evidence())))
            builder.add(FaultMet(kind="worker_lost", step=step), SegmentStarted(segment_index=0, from_step=step, until_step=step + STEPS))
            failures += 1
        elif move == "stop":
            builder.end("interrupted", 75).start(resumed_step=step)
        else:
            step = max(0, step - STEPS) if move == "kill_and_lose" else step
            builder.start(resumed_step=step)
            kills += 1
    return builder, kills, failures


@settings(max_examples=200, deadline=None)
@given(moves)
def test_what_was_lost_and_done_again_counts_once(history: list[str]) -> None:
    builder, kills, failures = play(history)
    state, result = fold_state(builder.lines), fold_result(builder.lines)
    undisturbed = JournalBuilder().start()
    for step in range(0, state.applied_steps, STEPS):
        undisturbed.segment(step // STEPS, step, step + STEPS)
    same = fold_result(undisturbed.lines)
    for field in (
        "applied_steps",
        "skipped_steps",
        "tokens",
        "tokens_per_s",
        "loss_first",
        "loss_last",
        "trajectory_digest",
        "weights_digest",
    ):
        assert getattr(result, field) == getattr(same, field), field
    assert state.restarts == kills + failures
    assert len(result.faults) == kills + failures
    assert state.highest_step >= state.applied_steps
    assert state.newest_validated_step == state.highest_step
    assert result.restarts == state.restarts


@settings(max_examples=50, deadline=None)
@given(moves, st.integers(0, 200))
def test_a_journal_cut_anywhere_still_folds_to_a_state_the_run_was_in(history: list[str], cut: int) -> None:
    lines = play(history)[0].lines[:cut]
    state = fold_state(lines)
    assert state.batch_index == state.applied_steps + state.skipped_steps
    assert state.applied_steps % STEPS == 0
    assert 0 <= state.applied_steps <= state.highest_step
