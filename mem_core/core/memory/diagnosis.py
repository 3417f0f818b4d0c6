"""Why memory is tight: size, leak, fragmentation, or a limit that came down. Pure, on a short history of step readings.

Each cause has another cure: a smaller micro-batch, a new worker process, a released cache. Taking one for another costs speed
for nothing, or does not help at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from mem_core.core.memory.ladder import MicroBatch
from mem_core.domain.segment import OutOfMemory, SegmentFailure

Cause = Literal["size", "leak", "fragmentation", "neighbour"]
WINDOW = 128
LEAST_READINGS = 24
LEAK_SHARE = 0.02  # growth over the window, as a part of the limit, below which a slope is noise
FRAGMENTED_SHARE = 0.2  # reserved and not used, as a part of the limit
RESERVED_NEAR = 0.9  # reserved, as a part of the limit, from which on what is not used of it matters
LOWERED = 0.95


@dataclass(frozen=True, slots=True)
class StepReading:
    """Memory around one step (or the few since the last reading), all ranks that share the limit together.

    `used_bytes` at the boundary after it, `peak_bytes` the highest within. `reserved_bytes` is what a caching allocator holds
    (0: there is none). `micro_batch` is the largest forward pass since the last reading.
    """

    batch_index: int
    micro_batch: MicroBatch
    used_bytes: int
    peak_bytes: int
    limit_bytes: int
    limit_name: str = ""
    reserved_bytes: int = 0
    alloc_retries: int = 0


def diagnose(history: Sequence[StepReading]) -> Cause:
    """The cause of the pressure that the last reading shows."""
    last = history[-1]
    if _limit_came_down(history):
        return "neighbour"
    if is_fragmented(last.peak_bytes, last.reserved_bytes, last.limit_bytes):
        return "fragmentation"
    if is_leak(history):
        return "leak"
    return "size"


def is_fragmented(used_bytes: int, reserved_bytes: int, limit_bytes: int) -> bool:
    """Whether a caching allocator fills the limit while a good part of what it holds is in pieces that no tensor uses.

    A smaller micro-batch would not help: the room is there, but not in one piece.
    """
    near = reserved_bytes >= RESERVED_NEAR * limit_bytes > 0
    return near and reserved_bytes - used_bytes >= FRAGMENTED_SHARE * limit_bytes


def failed_in_pieces(failure: SegmentFailure) -> bool:
    """Whether an allocation on a device failed although the allocator held enough: fragmentation and not size."""
    seen = failure.evidence
    if not isinstance(failure, OutOfMemory) or failure.memory != "device" or not (seen.reserved_bytes and seen.limit_bytes):
        return False
    return is_fragmented(seen.used_bytes or 0, seen.reserved_bytes, seen.limit_bytes)


def is_leak(history: Sequence[StepReading]) -> bool:
    """Whether memory at step boundaries grows steadily while the forward passes do not.

    The robust slope over the whole window and over both halves of it must be up: a plateau after a spike, or a higher level
    after larger passes, is not a leak.
    """
    if len(history) < LEAST_READINGS:
        return False
    recent = history[-WINDOW:]
    used = [reading.used_bytes for reading in recent]
    half = len(used) // 2
    tokens = [reading.micro_batch.tokens for reading in recent]
    if median(tokens[half:]) > 1.1 * median(tokens[:half]):
        return False
    growth = robust_slope(used) * (len(used) - 1)
    steady = robust_slope(used[:half]) > 0.3 * growth / len(used) and robust_slope(used[half:]) > 0.3 * growth / len(used)
    return growth >= LEAK_SHARE * recent[-1].limit_bytes and steady


def growth_per_step(history: Sequence[StepReading]) -> float:
    """Bytes that memory at step boundaries grows by in a step, as robust as `robust_slope`; readings may be some steps apart."""
    half = len(history) // 2
    if half == 0:
        return 0.0
    pairs = zip(history, history[half:], strict=False)
    return median((later.used_bytes - early.used_bytes) / max(1, later.batch_index - early.batch_index) for early, later in pairs)


def robust_slope(values: Sequence[float]) -> float:
    """Theil-Sen slope per index: the median slope of pairs, here of all values half a window apart; spikes do not move it."""
    half = len(values) // 2
    if half == 0:
        return 0.0
    return median((values[index + half] - values[index]) / half for index in range(len(values) - half))


def _limit_came_down(history: Sequence[StepReading]) -> bool:
    before = [reading.limit_bytes for reading in history[-WINDOW:-1] if reading.limit_name == history[-1].limit_name]
    return bool(before) and history[-1].limit_bytes < LOWERED * max(before[-LEAST_READINGS:])
