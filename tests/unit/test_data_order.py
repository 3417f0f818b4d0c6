"""Order of samples: a keyed permutation per epoch, whatever the cut (field reports 49, 50, 53, 134)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mem_core.runtime.data.serving.order import sample_ids

SIZES = st.integers(1, 300)


def stream(seed: int, batches: range, global_batch_size: int, num_samples: int) -> list[int]:
    return [int(i) for batch in batches for i in sample_ids(seed, batch, global_batch_size, num_samples)]


@settings(deadline=None)
@given(seed=st.integers(0, 2**63 - 1), num_samples=SIZES, global_batch_size=st.integers(1, 40), epochs=st.integers(1, 3))
def test_each_epoch_holds_each_id_once(seed: int, num_samples: int, global_batch_size: int, epochs: int) -> None:
    needed = -(-num_samples * epochs // global_batch_size)
    ids = stream(seed, range(needed), global_batch_size, num_samples)
    for epoch in range(epochs):
        assert sorted(ids[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), num_samples=SIZES, first=st.integers(1, 50), second=st.integers(1, 50))
def test_the_stream_of_ids_does_not_depend_on_the_batch_size(seed: int, num_samples: int, first: int, second: int) -> None:
    total = first * second
    assert stream(seed, range(second), first, num_samples) == stream(seed, range(first), second, num_samples)[:total]


@settings(deadline=None)
@given(batch=st.integers(0, 10**12), num_samples=st.integers(1, 10**9), global_batch_size=st.integers(1, 3_000))
def test_any_position_is_reached_directly_and_stays_in_range(batch: int, num_samples: int, global_batch_size: int) -> None:
    ids = sample_ids(7, batch, global_batch_size, num_samples)
    assert ids.shape == (global_batch_size,)
    assert ids.dtype == np.int64
    assert 0 <= ids.min() <= ids.max() < num_samples
    whole_epoch_free = batch * global_batch_size % num_samples + global_batch_size <= num_samples
    if whole_epoch_free:
        assert len(set(ids.tolist())) == global_batch_size


def test_resume_at_any_batch_continues_the_uninterrupted_order() -> None:
    """25 rows, global batch 2, segments of 7 steps, 4 epochs: the same ids as one uninterrupted run (report 49)."""
    whole = stream(0, range(50), 2, 25)
    cut = [i for start in range(0, 50, 7) for i in stream(0, range(start, min(start + 7, 50)), 2, 25)]
    assert cut == whole
    epochs = [tuple(whole[k * 25 : (k + 1) * 25]) for k in range(4)]
    assert len(set(epochs)) == 4, "each epoch has an order of its own"


@pytest.mark.parametrize("num_samples", [1, 3, 7])
def test_a_dataset_smaller_than_a_batch_wraps(num_samples: int) -> None:
    """1, 3, 7 rows with global batch 8: full batches, no row more than once oftener than another (report 134)."""
    ids = stream(0, range(100), 8, num_samples)
    counts = np.bincount(ids, minlength=num_samples)
    assert len(ids) == 800
    assert counts.max() - counts.min() <= 1


def test_seed_and_epoch_both_change_the_order() -> None:
    orders = {tuple(sample_ids(seed, epoch, 100, 100).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_positions_are_uniform_over_epochs() -> None:
    """Chi-square over (position, id) of 2,000 epochs of 50 rows stays near its degrees of freedom."""
    counts = np.zeros((50, 50))
    for epoch in range(2_000):
        counts[np.arange(50), sample_ids(1, epoch, 50, 50)] += 1
    chi_square = ((counts - 40) ** 2 / 40).sum() / 49**2
    assert 0.85 < chi_square < 1.15


def test_the_order_is_frozen() -> None:
    """Runs resume across versions of MEM and numpy: these numbers may never change."""
    assert sample_ids(0, 0, 8, 100).tolist() == FROZEN_FIRST
    assert sample_ids(12345, 999_999, 8, 91_998).tolist() == FROZEN_LATE


def test_the_result_is_the_callers_own() -> None:
    first = sample_ids(0, 0, 8, 100)
    first[:] = -1
    assert sample_ids(0, 0, 8, 100).tolist() == FROZEN_FIRST


@pytest.mark.parametrize("bad", [(-1, 0, 8, 10), (0, -1, 8, 10), (0, 0, 0, 10), (0, 0, 8, 0)])
def test_impossible_arguments_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        sample_ids(*bad)


FROZEN_FIRST = [73, 72, 5, 53, 63, 51, 33, 88]
FROZEN_LATE = [18804, 63930, 77707, 71608, 79697, 16452, 12362, 43356]
