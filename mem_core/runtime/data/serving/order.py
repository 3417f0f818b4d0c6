"""Which samples form a global batch: a pure function of (seed, batch index, sizes), the same for any cut into segments (I1, I2).

Every epoch is a keyed permutation of the samples, computed sample by sample with a Feistel network and cycle walking
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Nothing is stored or skipped, so that batch 900,000
costs what batch 1 costs, and no library's random stream is involved: the order never changes under an upgrade.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mem_core.runtime.data.serving.mixing import Mix, Samples

_ROUNDS = 8
_BLOCK_IDS = 1_024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ROUND_STEPS = tuple(np.uint64((0xD1B54A32D192ED03 * (turn + 1)) % 2**64) for turn in range(_ROUNDS))
_SOURCE_SEED = 0xA24BAED4963EE407
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)


def sample_ids(seed: int, batch_index: int, global_batch_size: int, samples: Samples) -> NDArray[np.int64]:
    """Sample ids, shape [global_batch_size], of one global batch. `samples`: how many there are, or a `Mix` of weighted sources.

    Position p = batch_index * global_batch_size + i of the endless stream belongs to epoch p // num_samples; each epoch
    holds each id of 0 .. num_samples - 1 exactly once, in an order keyed by (seed, epoch); of a mix, what its sources give to it. A
    batch may straddle epochs, and one that is larger than the dataset wraps. Cost and memory do not depend on `batch_index` or on
    how many samples there are.

    Raises:
        ValueError: a negative seed or index, or a size below 1.
    """
    num_samples = samples.epoch_rows if isinstance(samples, Mix) else samples
    if seed < 0 or batch_index < 0 or global_batch_size < 1 or num_samples < 1:
        raise ValueError(
            f"seed {seed} and batch_index {batch_index} must be at least 0, "
            f"global_batch_size {global_batch_size} and num_samples {num_samples} at least 1"
        )
    batches_per_block = max(1, _BLOCK_IDS // global_batch_size)
    block, within = divmod(batch_index, batches_per_block)
    ids = _block_ids(seed, block, batches_per_block * global_batch_size, samples)
    return ids[within * global_batch_size : (within + 1) * global_batch_size].copy()


@lru_cache(maxsize=4)
def _block_ids(seed: int, block: int, size: int, samples: Samples) -> NDArray[np.int64]:
    """Ids at positions block * size onwards. Small batches are computed many at a time, since numpy calls cost more than ids."""
    if isinstance(samples, Mix):
        return _mixed_ids(seed, *_places(seed, block * size, size, samples.epoch_rows), samples)
    places, _ = _places(seed, block * size, size, samples)
    return places.astype(np.int64)


def _places(seed: int, start: int, size: int, epoch_rows: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Which place of its epoch comes at each position from `start` on, and which epoch that is; shapes [size]."""
    epoch, offset = divmod(start, epoch_rows)
    steps = np.arange(size, dtype=np.uint64) + np.uint64(offset)
    epochs = np.uint64(epoch) + steps // np.uint64(epoch_rows)
    return _permute(steps % np.uint64(epoch_rows), _keys(seed, epochs), epoch_rows), epochs


def _mixed_ids(seed: int, places: NDArray[np.uint64], epochs: NDArray[np.uint64], mix: Mix) -> NDArray[np.int64]:
    """The places of an epoch belong to its sources in turn; what stands there is the next of the source's own stream."""
    bounds = np.cumsum((0, *mix.draws)).astype(np.uint64)
    firsts = np.cumsum((0, *mix.rows)).astype(np.uint64)
    sources = np.searchsorted(bounds, places, side="right") - 1
    ids = np.empty(places.size, np.int64)
    for number, (rows, draws) in enumerate(zip(mix.rows, mix.draws, strict=True)):
        chosen = sources == number
        drawn = epochs[chosen] * np.uint64(draws) + places[chosen] - bounds[number]
        keys = _keys(seed + (number + 1) * _SOURCE_SEED, drawn // np.uint64(rows))
        ids[chosen] = (_permute(drawn % np.uint64(rows), keys, rows) + firsts[number]).astype(np.int64)
    return ids


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection on 64 bits in which every input bit moves every output bit."""
    value = (value ^ (value >> _SHIFT_30)) * _MIX_1
    value = (value ^ (value >> _SHIFT_27)) * _MIX_2
    return value ^ (value >> _SHIFT_31)


def _keys(seed: int, epochs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    seed_word = _mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
    return _mix(seed_word ^ (epochs * _GOLDEN + _MIX_2))


def _permute(values: NDArray[np.uint64], keys: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Keyed permutation of 0 .. size - 1, element by element.

    The network permutes a power of two below 2 * size; values that land outside walk on along their cycle until they are
    inside. The walk ends, since each cycle that starts inside comes back inside: at most 2**bits - size extra turns.
    """
    bits = max(2, (size - 1).bit_length())
    values = _feistel(values, keys, bits)
    outside = np.flatnonzero(values >= np.uint64(size))
    for _ in range(2**bits):
        if not outside.size:
            break
        walked = _feistel(values[outside], keys[outside], bits)
        values[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return values


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for turn in range(_ROUNDS):
        round_key = keys + _ROUND_STEPS[turn]
        if turn % 2:
            low = low ^ (_mix(high + round_key) & low_mask)
        else:
            high = high ^ (_mix(low + round_key) & high_mask)
    return (high << low_bits) | low
