"""Splits: every row once, equal counts on every rank, bounds kept, deterministic, little padding."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mem_core.domain.plan import MemoryPlan
from mem_core.runtime.data.serving.splits import length_buckets, padded_length, split_batch

SEQUENCE_LENGTH = 512
bucket = partial(padded_length, sequence_length=SEQUENCE_LENGTH)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, int, MemoryPlan]:
    ranks, rows = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, SEQUENCE_LENGTH), min_size=ranks * rows, max_size=ranks * rows))
    plan = MemoryPlan(micro_batch_rows=draw(st.integers(0, 12)), micro_batch_tokens=draw(st.integers(0, 3_000)))
    return np.array(lengths, np.int32), ranks, plan


@settings(deadline=None)
@given(batches())
def test_every_row_once_and_all_ranks_alike(batch: tuple[np.ndarray, int, MemoryPlan]) -> None:
    lengths, ranks, plan = batch
    split = split_batch(lengths, ranks, plan, bucket)
    assert sorted(p for rank in split for micro in rank for p in micro) == list(range(len(lengths)))
    assert len(split) == ranks
    assert len({tuple(len(micro) for micro in rank) for rank in split}) == 1, "same number of micro-batches with the same rows"
    assert all(micro for rank in split for micro in rank)
    assert {sum(len(micro) for micro in rank) for rank in split} == {len(lengths) // ranks}


@settings(deadline=None)
@given(batches())
def test_bounds_are_kept(batch: tuple[np.ndarray, int, MemoryPlan]) -> None:
    lengths, ranks, plan = batch
    for rank in split_batch(lengths, ranks, plan, bucket):
        for micro in rank:
            padded = len(micro) * bucket(int(lengths[list(micro)].max()))
            assert plan.micro_batch_rows == 0 or len(micro) <= plan.micro_batch_rows
            assert plan.micro_batch_tokens == 0 or padded <= plan.micro_batch_tokens or len(micro) == 1


@settings(deadline=None)
@given(batches())
def test_the_split_is_a_pure_function(batch: tuple[np.ndarray, int, MemoryPlan]) -> None:
    lengths, ranks, plan = batch
    before = lengths.copy()
    assert split_batch(lengths, ranks, plan, bucket) == split_batch(lengths.astype(np.int64), ranks, plan, bucket)
    assert (lengths == before).all()


@settings(deadline=None)
@given(batches())
def test_ranks_carry_like_loads(batch: tuple[np.ndarray, int, MemoryPlan]) -> None:
    """Dealt out in sorted order, two ranks differ by no more than the longest row."""
    lengths, ranks, plan = batch
    loads = [sum(int(lengths[p]) for micro in rank for p in micro) for rank in split_batch(lengths, ranks, plan, bucket)]
    if len(set(lengths.tolist())) > 1:
        assert max(loads) - min(loads) <= int(lengths.max())


def test_equal_lengths_give_the_plain_consecutive_split() -> None:
    split = split_batch(np.full(8, 128, np.int32), 2, MemoryPlan(micro_batch_rows=3), bucket)
    assert split == (((0, 1, 2), (3,)), ((4, 5, 6), (7,)))
    assert split_batch(np.full(4, 128), 1, MemoryPlan(micro_batch_rows=0), bucket) == (((0, 1, 2, 3),),)
    assert split_batch(np.full(4, 128), 1, MemoryPlan(micro_batch_rows=0, micro_batch_tokens=256), bucket) == (((0, 1), (2, 3)),)


def test_one_long_row_gets_a_micro_batch_of_its_own() -> None:
    """Report 1: 1 row 50 times longer than the rest does not set the size of everybody's micro-batch."""
    lengths = np.array([10] * 5 + [500] + [10] * 2)
    split = split_batch(lengths, 1, MemoryPlan(micro_batch_rows=0, micro_batch_tokens=128), bucket)
    assert split == (((5,), (0, 1, 2, 3, 4, 6, 7)),)


def test_padding_is_little_on_data_with_a_long_tail() -> None:
    """Sorted packing pads less than a third of what consecutive packing pads."""
    lengths = np.minimum(np.random.default_rng(0).pareto(1.2, 64) * 20 + 5, SEQUENCE_LENGTH).astype(np.int32)
    split = split_batch(lengths, 1, MemoryPlan(micro_batch_rows=8), bucket)
    packed = sum(len(micro) * bucket(int(lengths[list(micro)].max())) for micro in split[0])
    consecutive = sum(8 * bucket(int(lengths[k : k + 8].max())) for k in range(0, 64, 8))
    assert packed - lengths.sum() < (consecutive - lengths.sum()) / 3


@settings(deadline=None)
@given(st.integers(1, 5_000), st.integers(1, 5_000))
def test_padded_lengths_are_few_and_close(longest: int, extra: int) -> None:
    sequence_length = longest + extra
    padded = padded_length(longest, sequence_length)
    assert longest <= padded <= sequence_length
    assert padded in length_buckets(sequence_length)
    assert padded <= max(16, 1.5 * longest)
    assert len(length_buckets(sequence_length)) <= 2 * sequence_length.bit_length()


def test_padded_length_by_example() -> None:
    assert [padded_length(n, 1_000) for n in (1, 16, 17, 25, 33, 49, 65, 513, 769)] == [16, 16, 24, 32, 48, 64, 96, 768, 1_000]
    assert length_buckets(100) == (16, 24, 32, 48, 64, 96, 100)
    assert length_buckets(5) == (5,)


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rows cannot be divided evenly over 2 ranks"):
        split_batch(np.ones(7, np.int32), 2, MemoryPlan(micro_batch_rows=1), bucket)
    with pytest.raises(ValueError, match="does not fit"):
        padded_length(129, 128)


def test_short_rows_are_not_padded_to_a_long_one_to_fill_a_pass() -> None:
    """Two rows of 512 and thirty of 32 under 1,024 tokens: two passes, and not padding that costs more than a pass."""
    lengths = np.array([512] + [32] * 30 + [512])
    split = split_batch(lengths, 1, MemoryPlan(micro_batch_rows=0, micro_batch_tokens=1_024), bucket)
    assert [len(micro) for micro in split[0]] == [2, 30]
    assert set(split[0][0]) == {0, 31}


@pytest.mark.parametrize("seed", range(5))
def test_the_cuts_are_the_cheapest_there_are(seed: int) -> None:
    """Against every way to cut eight rows, a pass counted as 256 tokens more."""
    lengths = np.sort(np.random.default_rng(seed).integers(1, 400, 8))[::-1]
    (split,) = split_batch(lengths, 1, MemoryPlan(micro_batch_rows=0, micro_batch_tokens=800), bucket)

    def cost(sizes: tuple[int, ...]) -> float:
        starts = np.cumsum((0, *sizes[:-1]))
        padded = [size * bucket(int(lengths[start])) for size, start in zip(sizes, starts, strict=True)]
        allowed = all(tokens <= 800 or size == 1 for tokens, size in zip(padded, sizes, strict=True))
        return sum(padded) + 256 * len(sizes) if allowed else float("inf")

    mine = tuple(len(micro) for micro in split)
    assert cost(mine) == min(map(cost, _compositions(8)))


def _compositions(total: int) -> list[tuple[int, ...]]:
    """Every way to write `total` as a sum in order."""
    return [()] if total == 0 else [(first, *rest) for first in range(1, total + 1) for rest in _compositions(total - first)]
