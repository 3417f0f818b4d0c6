"""Ledger and fold together: over any history of attempts, kills and ends, the buckets sum to the wall time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mem_core.core.run.fold import fold_result, fold_state
from mem_core.core.run.goodput import GoodputLedger, split_productive
from mem_core.domain.events import AttemptStarted, SegmentStarted
from mem_core.testing.synthetic_run import JournalBuilder

SEGMENT_STEPS = 100
seconds = st.floats(0.01, 500.0)


class Process:
    """One attempt as the flow would drive it: a ledger, segments of 0.1 s a step, and an end of its own or by a kill."""

    def __init__(self, builder: JournalBuilder, highest_step: int) -> None:
        self.builder = builder
        self.highest_step = highest_step
        self.ledger = GoodputLedger(lambda: builder.now_s)

    def train(self, index: int, step: int) -> None:
        duration_s = SEGMENT_STEPS * 0.1
        self.ledger.enter("productive")
        self.builder.add(SegmentStarted(segment_index=index, from_step=step, until_step=step + SEGMENT_STEPS), after_s=duration_s)
        redone_s = split_productive(step, step + SEGMENT_STEPS, self.highest_step, duration_s)[1]
        self.ledger.move("productive", "redone", redone_s)
        self.ledger.enter("idle")
        self.builder.add(self.ledger.drain())


attempts = st.lists(
    st.tuples(seconds, st.integers(0, 3), seconds, st.sampled_from(["killed", "interrupted"]), seconds, st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(attempts)
def test_the_buckets_sum_to_the_wall_time(history: list[tuple[float, int, float, str, float, bool]]) -> None:
    builder, first_s = JournalBuilder(), 0.0
    for start_s, num_segments, tail_s, end, pause_s, lose_last in history:
        state = fold_state(builder.lines)
        step = max(0, state.highest_step - (SEGMENT_STEPS if lose_last else 0))
        process = Process(builder, state.highest_step)
        builder.now_s += start_s
        builder.add(AttemptStarted(attempt=builder.attempt + 1, pid=1, host="node", resumed_step=step))
        first_s = first_s or builder.now_s - start_s
        for number in range(num_segments):
            process.train(number, step + number * SEGMENT_STEPS)
            builder.commit(step + (number + 1) * SEGMENT_STEPS)
        builder.now_s += tail_s
        if end != "killed":
            builder.add(process.ledger.drain()).end(end, 75)
        builder.now_s += pause_s
    builder.start()
    measured_s = sum(fold_result(builder.lines).goodput.seconds.values())
    never_drained_s = history[0][0] if history[0][3] == "killed" and history[0][1] == 0 else 0.0
    assert measured_s == pytest.approx(builder.now_s - first_s - never_drained_s, rel=0.01)


def test_a_segment_that_is_done_again_is_redone_and_not_productive_twice() -> None:
    builder = JournalBuilder()
    for resumed_step in (None, 0):
        process = Process(builder, fold_state(builder.lines).highest_step)
        builder.start(resumed_step)
        process.train(0, 0)
        builder.commit(SEGMENT_STEPS)
    goodput = fold_result(builder.lines).goodput
    assert goodput.seconds == pytest.approx({"productive": 10.0, "redone": 10.0})
    assert goodput.fraction == pytest.approx(0.5)
