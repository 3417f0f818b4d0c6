"""The ladder ends, each rung is smaller, and recorded plans are merged as they were recorded. The line and the first plan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mem_core.core.memory.fit import exhausted_remedy, ways_out
from mem_core.core.memory.ladder import MicroBatch, PlanBounds, can_shrink, largest_micro_batch, merge_changes, shrink_plan
from mem_core.core.memory.model import PeakLine, PeakSample, fit_line
from mem_core.core.memory.start import Limit, Needs, could_bind, moments_to_come, room_for_activations, starting_plan
from mem_core.domain.environment import ModelNumbers
from mem_core.domain.plan import MemoryPlan, MemoryPlanChange, plan_at
from mem_core.domain.request import RuntimeRequest
from mem_core.runtime.data.serving.splits import length_buckets, padded_length, split_batch

GIB = 2**30


@given(
    rows=st.integers(1, 64),
    length=st.sampled_from(length_buckets(2_048)),
    plan_rows=st.integers(0, 64),
    tokens=st.integers(0, 10_000),
    offload=st.booleans(),
    checkpoint=st.booleans(),
)
def test_the_ladder_ends_at_one_row_and_every_rung_is_smaller(
    rows: int, length: int, plan_rows: int, tokens: int, offload: bool, checkpoint: bool
) -> None:
    """From any plan: at most log2 rungs of size and two more, and the passes never get larger on the way."""
    bounds = PlanBounds(most_rows=rows, longest_tokens=length, may_checkpoint=checkpoint, may_offload=offload)
    plan = MemoryPlan(micro_batch_rows=plan_rows, micro_batch_tokens=tokens)
    sizes = [largest_micro_batch(plan, bounds).tokens]
    for _ in range(30):
        lower = shrink_plan(plan, bounds)
        if lower is None:
            break
        assert lower != plan
        plan = lower
        sizes.append(largest_micro_batch(plan, bounds).tokens)
    assert not can_shrink(plan, bounds)
    assert largest_micro_batch(plan, bounds).rows == 1
    assert plan.activation_checkpointing == checkpoint
    assert (plan.offload_optimizer == "cpu") == offload
    assert sizes == sorted(sizes, reverse=True)


@given(data=st.data())
def test_a_batch_that_failed_is_cut_smaller_by_the_next_rung(data: st.DataObject) -> None:
    """Whatever pass failed: under the next plan the largest pass of the same batch has at most half its tokens, or is one row."""
    lengths = np.array(data.draw(st.lists(st.integers(1, 512), min_size=2, max_size=32)))
    plan = MemoryPlan(micro_batch_rows=data.draw(st.integers(0, 8)), micro_batch_tokens=data.draw(st.sampled_from([0, 64, 700, 4_000])))

    def bucket(longest: int) -> int:
        return padded_length(longest, 512)

    def passes(plan: MemoryPlan) -> list[MicroBatch]:
        (mine,) = split_batch(lengths, 1, plan, bucket)
        return [MicroBatch(len(rows), bucket(int(lengths[list(rows)].max()))) for rows in mine]

    failed = data.draw(st.sampled_from(passes(plan)))
    bounds = PlanBounds(most_rows=len(lengths), longest_tokens=512)
    lower = shrink_plan(plan, bounds, failed)
    if failed.rows == 1:
        assert lower == plan.model_copy(update={"activation_checkpointing": True})
        return
    assert lower is not None
    assert all(size.rows == 1 or size.tokens <= failed.tokens / 2 or size.tokens <= 16 for size in passes(lower))
    assert sum(size.rows for size in passes(lower)) == len(lengths)


def change(batch_index: int, tokens: int) -> MemoryPlanChange:
    """A change to a bound of tokens."""
    return MemoryPlanChange(batch_index=batch_index, plan=MemoryPlan(micro_batch_rows=0, micro_batch_tokens=tokens), reason="test")


def test_a_later_recorded_change_wins_when_the_checkpoint_is_older() -> None:
    """The checkpoint knows batch 5; the journal has since learnt that batch 3 must be smaller: 5 is dropped, 3 and later follow."""
    saved = (change(0, 100), change(5, 200))
    journaled = (change(0, 100), change(3, 50))
    merged = merge_changes(saved, journaled)
    default = MemoryPlan(micro_batch_rows=8)
    assert [plan_at(merged, index, default).micro_batch_tokens for index in (0, 2, 3, 5, 9)] == [100, 100, 50, 50, 50]
    assert merge_changes(saved, saved) == saved
    assert merge_changes((), journaled) == journaled
    assert merge_changes(saved, ()) == saved


@given(
    fixed=st.integers(0, 10**9), slope=st.integers(1, 10**6), lengths=st.lists(st.integers(1, 4_096), min_size=2, max_size=6, unique=True)
)
def test_a_straight_line_is_found_again(fixed: int, slope: int, lengths: list[int]) -> None:
    """Without noise the fit is the truth, and what is said to fit does fit."""
    samples = [PeakSample(MicroBatch(1, length), fixed + slope * length) for length in lengths]
    line = fit_line(samples)
    assert line is not None
    assert line.predict(MicroBatch(3, 1_000)) == pytest.approx(fixed + slope * 3_000, rel=1e-6)
    tokens = line.tokens_that_fit(fixed + slope * 5_000, 512)
    assert tokens == pytest.approx(5_000, abs=2)


def test_a_squared_term_is_found_where_attention_needs_one() -> None:
    """rows * length**2 is told apart from rows * length by different lengths; long rows then get fewer tokens."""
    sizes = [MicroBatch(1, 256), MicroBatch(1, 1_024), MicroBatch(1, 2_048), MicroBatch(4, 256), MicroBatch(2, 2_048)]
    truth = PeakLine(1e6, 100.0, 0.5)
    line = fit_line([PeakSample(size, truth.predict(size)) for size in sizes])
    assert line is not None
    assert line.per_square == pytest.approx(0.5, rel=0.05)
    assert line.tokens_that_fit(5e7, 4_096) < line.tokens_that_fit(5e7, 256)


def test_one_size_is_no_line() -> None:
    """Two readings of the same size say nothing about the slope."""
    assert fit_line([PeakSample(MicroBatch(1, 64), 5), PeakSample(MicroBatch(1, 64), 6)]) is None


BOUNDS = PlanBounds(most_rows=8, longest_tokens=1_024)
LINE = PeakLine(0.0, 1_000.0)


@pytest.mark.parametrize(
    ("default", "room", "expected"),
    [
        (MemoryPlan(micro_batch_rows=8), 8_192_000, MemoryPlan(micro_batch_rows=8)),
        (MemoryPlan(micro_batch_rows=8), 4_100_000, MemoryPlan(micro_batch_rows=8, micro_batch_tokens=4_100)),
        (MemoryPlan(micro_batch_rows=2), 4_100_000, MemoryPlan(micro_batch_rows=8, micro_batch_tokens=4_100)),
        (MemoryPlan(micro_batch_rows=2), 9_000_000, MemoryPlan(micro_batch_rows=8)),
        (MemoryPlan(micro_batch_rows=8), 600_000, MemoryPlan(micro_batch_rows=8, micro_batch_tokens=2_400, activation_checkpointing=True)),
        (MemoryPlan(micro_batch_rows=8), 100_000, MemoryPlan(micro_batch_rows=8, micro_batch_tokens=400, activation_checkpointing=True)),
        (MemoryPlan(micro_batch_rows=8), -5, MemoryPlan(micro_batch_rows=8, micro_batch_tokens=16, activation_checkpointing=True)),
    ],
)
def test_the_first_plan_takes_what_was_measured(default: MemoryPlan, room: float, expected: MemoryPlan) -> None:
    """All fits: nothing changes. Less: bounded in tokens. Not even one row: recompute, which needs a quarter here."""
    assert starting_plan(default, BOUNDS, LINE, PeakLine(0.0, 250.0), room) == expected


def test_room_is_what_the_tightest_moment_leaves() -> None:
    """Two ranks share a limit; what is still to come counts for both; a small update leaves the loss as the tightest moment."""
    limit = Limit("cgroup", used_bytes=4 * GIB, peak_bytes=4 * GIB, limit_bytes=10 * GIB, shares=2)
    room = room_for_activations(limit, Needs(to_come=GIB, gradients=0, step=0, retained=0.0), 0.9)
    assert room == pytest.approx((0.88 * 10 - 6) / 2 * GIB)
    tighter = room_for_activations(limit, Needs(to_come=GIB, gradients=0, step=GIB, retained=1.0), 0.9)
    assert tighter == pytest.approx(room - GIB)


@pytest.mark.parametrize(
    ("stage", "dtype", "applied", "offloaded", "expected"),
    [
        (0, "float32", 0, False, 300), (1, "float32", 0, False, 200), (2, "float32", 0, False, 200), (3, "float32", 0, False, 200),
        (0, "bfloat16", 0, False, 200), (1, "float32", 7, False, 0), (1, "float32", 0, True, 0),
    ],
)  # fmt: skip
def test_the_first_update_allocates_the_moments(stage: int, dtype: str, applied: int, offloaded: bool, expected: int) -> None:
    """At every stage, and only once; the master copy is there with the engine."""
    assert moments_to_come(300, stage=stage, dtype=dtype, applied_steps=applied, offloaded=offloaded) == expected


def test_the_first_plan_leaves_room_for_the_moments() -> None:
    """llama-small with 3 GiB, as read: 545 MiB used, 99 MiB weights. Passes that were allowed without the moments would pass the mark."""
    gradients, optimizer, transient = 103_581_696, 310_745_088, 207_163_392
    limit = Limit("memory.budget", 545 * 2**20, 545 * 2**20, 3 * GIB)
    to_come = moments_to_come(optimizer, stage=1, dtype="float32", applied_steps=0, offloaded=False)
    room = room_for_activations(limit, Needs(to_come, gradients, transient, 0.6), 0.9)
    assert limit.used_bytes + to_come + gradients + room <= 0.9 * limit.limit_bytes
    assert limit.used_bytes + to_come + gradients + transient + 0.6 * room <= 0.9 * limit.limit_bytes


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_addresses_of_freed_activations_count(name: str) -> None:
    """llama-small under 2,166 MiB of address space, as read: 1,066 MiB mapped, a pass takes 97 MiB and 422.5 KiB a token. The plan of
    1,024 tokens that counted 0.6 of them, as of resident memory, came to 2,044 MiB, above the watermark of 1,949."""
    mib = 2**20
    needs = Needs(to_come=198 * mib, gradients=99 * mib, step=198 * mib, retained=0.6)
    line = PeakLine(97 * mib, 422.5 * 1024)
    plain = Limit("memory.budget", 1_066 * mib, 1_066 * mib, 2_166 * mib)
    assert line.tokens_that_fit(room_for_activations(plain, needs, 0.9), 512) > 1_024
    tokens = line.tokens_that_fit(room_for_activations(Limit(name, 1_066 * mib, 1_066 * mib, 2_166 * mib), needs, 0.9), 512)
    assert 512 < tokens < 1_024 * (1_949 / 2_044)


def test_nothing_is_measured_where_nothing_can_bind() -> None:
    """Below half of every limit by the formula there is no calibration."""
    needs = Needs(to_come=0, gradients=0, step=0, retained=0.6)
    roomy = Limit("MemAvailable", used_bytes=GIB, peak_bytes=GIB, limit_bytes=16 * GIB)
    assert not could_bind(roomy, needs, 2 * GIB)
    assert could_bind(roomy, needs, 8 * GIB)


REQUEST = RuntimeRequest.model_validate({"run_id": "fit", "store": "/nowhere", "data": {"sequence_length": 4_096}})
SEVEN_B = ModelNumbers(
    num_parameters=7_000_000_000, num_layers=32, hidden_size=4_096, intermediate_size=11_008, vocab_size=32_000, num_heads=32
)


def test_the_last_word_names_ways_out_with_their_numbers() -> None:
    """Exit 78 says what one row needs, the limit, and which changes are predicted to fit, each with its bytes."""
    text = exhausted_remedy(SEVEN_B, REQUEST, "float32", "cpu", 184 * GIB)
    assert "One row of 4096 tokens" in text
    assert "184.0 GiB" in text
    assert "What would fit: data.sequence_length: 1024 (183.8 GiB)" in text
    assert all(way.needed_bytes > 0 for way in ways_out(SEVEN_B, REQUEST, "float32", "cpu"))
    hopeless = exhausted_remedy(SEVEN_B, REQUEST, "float32", "cpu", GIB)
    assert "Nothing smaller is predicted to fit" in hopeless
