"""How a global batch is cut over ranks and micro-batches: pure, deterministic, the same on every rank.

The split never changes which samples form the batch (I1), only which forward pass they go through.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mem_core.domain.plan import MemoryPlan

Split = tuple[tuple[tuple[int, ...], ...], ...]
SMALLEST_BUCKET = 16
NEVER = 2**62
PASS_TOKENS = 256  # what one more pass costs, in tokens; measured between 128 (small models) and 512, where rates hardly change


def padded_length(longest: int, sequence_length: int) -> int:
    """Length in tokens to which a micro-batch is padded: the next of 16, 24, 32, 48, 64, 96, ..., capped at `sequence_length`.

    Few fixed lengths, so that a compiled model is compiled a few times and not once per batch; padding adds at most half.

    Raises:
        ValueError: `longest` is below 1 or above `sequence_length`.
    """
    if not 1 <= longest <= sequence_length:
        raise ValueError(f"a row of {longest} tokens does not fit: allowed 1 to {sequence_length}")
    power = max(SMALLEST_BUCKET, 1 << (longest - 1).bit_length())
    between = power // 4 * 3
    bucket = between if between >= longest and between > SMALLEST_BUCKET else power
    return min(bucket, sequence_length)


def length_buckets(sequence_length: int) -> tuple[int, ...]:
    """Every length that `padded_length` can return, ascending: the shapes to warm up for a compiled model."""
    lengths = [min(SMALLEST_BUCKET, sequence_length)]
    while lengths[-1] < sequence_length:
        lengths.append(padded_length(lengths[-1] + 1, sequence_length))
    return tuple(lengths)


def split_batch(lengths: NDArray[np.integer], num_ranks: int, plan: MemoryPlan, length_bucket: Callable[[int], int]) -> Split:
    """For each rank its micro-batches, each a tuple of positions 0 .. len(lengths) - 1 in the global batch.

    Every rank gets len(lengths) / num_ranks rows and the same number of micro-batches of the same number of rows, since
    ZeRO-3's collectives need equal counts. Each micro-batch holds at most `plan.micro_batch_rows` rows and
    rows * length_bucket(longest) <= `plan.micro_batch_tokens` padded tokens (0 = no bound); one row alone is always allowed.
    Equal lengths give the plain consecutive split. Otherwise rows are dealt out longest first, back and forth over the ranks,
    so that rows of like length share a micro-batch and the ranks carry like loads at the same time.

    Raises:
        ValueError: the rows cannot be divided evenly by the ranks, or there are none.
    """
    num_rows = len(lengths)
    if num_ranks < 1 or num_rows < 1 or num_rows % num_ranks:
        raise ValueError(f"{num_rows} rows cannot be divided evenly over {num_ranks} ranks")
    rows_per_rank = num_rows // num_ranks
    if int(lengths.min()) == int(lengths.max()):
        grid = np.arange(num_rows).reshape(num_ranks, rows_per_rank)
        longest = [int(lengths[0])] * rows_per_rank
    else:
        order = np.argsort(-lengths.astype(np.int64), kind="stable").reshape(rows_per_rank, num_ranks)
        longest = lengths[order[:, 0]].tolist()
        order[1::2] = order[1::2, ::-1]
        grid = order.T
    cuts = _cuts(longest, plan, length_bucket)
    return tuple(tuple(tuple(row[start:stop]) for start, stop in cuts) for row in grid.tolist())


def _cuts(longest: list[int], plan: MemoryPlan, length_bucket: Callable[[int], int]) -> list[tuple[int, int]]:
    """Cut 0 .. len(longest) into runs. `longest` is not ascending, so that the first row of a run sets its padded length."""
    most_rows = plan.micro_batch_rows or len(longest)
    if plan.micro_batch_tokens:
        return _cheapest_cuts([length_bucket(length) for length in longest], most_rows, plan.micro_batch_tokens)
    return [(start, min(start + most_rows, len(longest))) for start in range(0, len(longest), most_rows)]


def _cheapest_cuts(buckets: list[int], most_rows: int, most_tokens: int) -> list[tuple[int, int]]:
    """The cuts of least padded tokens, each pass counted as `PASS_TOKENS` more: filling every pass would pad short rows to long ones.

    Dynamic programming over the end of the last run; about 8 microseconds a row.
    """
    lengths = np.asarray(buckets, dtype=np.int64)
    cost = np.zeros(len(buckets) + 1, dtype=np.int64)
    first = [0] * (len(buckets) + 1)
    for stop in range(1, len(buckets) + 1):
        low = max(0, stop - most_rows)
        padded = np.arange(stop - low, 0, -1) * lengths[low:stop]
        total = cost[low:stop] + padded
        total[:-1][padded[:-1] > most_tokens] = NEVER  # one row alone is always allowed
        best = int(total.argmin())
        cost[stop], first[stop] = total[best] + PASS_TOKENS, low + best
    cuts: list[tuple[int, int]] = []
    stop = len(buckets)
    while stop:
        cuts.append((first[stop], stop))
        stop = first[stop]
    return cuts[::-1]
