"""Memory that grows from segment to segment, however far the limit is. Pure.

Pressure says when something must be done; growth says that something is kept which should not be, long before that.
"""

from dataclasses import dataclass
from statistics import median

from mem_core.core.memory.diagnosis import robust_slope
from mem_core.domain.units import format_bytes

LEAST_BOUNDARIES = 8
WARM_UP_BOUNDARIES = 2  # first steps and saves fill caches that stay
GROWN_SHARE = 0.2  # of what was used after warm-up
GROWN_BYTES = 64 * 2**20  # below it growth is noise of an allocator
STEADY_SHARE = 0.3  # of the mean growth, that both halves must show


@dataclass(frozen=True, slots=True)
class Growth:
    """What is used at the ends of segments, in bytes, since the process began. `said_at` is the level that was reported last."""

    used_bytes: tuple[int, ...] = ()
    said_at: int = 0

    def add(self, used_bytes: int) -> "Growth":
        """With one more segment's end."""
        return Growth((*self.used_bytes[-255:], used_bytes), self.said_at)

    def found(self) -> str:
        """The growth in words where it is steady and large; empty where it is not, or not half as large again as what was said."""
        seen = self.used_bytes[WARM_UP_BOUNDARIES:]
        if len(seen) < LEAST_BOUNDARIES:
            return ""
        half = len(seen) // 2
        first, last = int(median(seen[:2])), int(median(seen[-2:]))
        per_segment = (last - first) / (len(seen) - 2)  # from between the first two to between the last two
        steady = min(robust_slope(seen[:half]), robust_slope(seen[half:])) > STEADY_SHARE * per_segment
        if last - first < max(GROWN_BYTES, GROWN_SHARE * first) or not steady or last < 1.5 * self.said_at:
            return ""
        return (
            f"memory grows from segment to segment, a leak of about {format_bytes(per_segment)} a segment: "
            f"{format_bytes(first)} to {format_bytes(last)} over {len(seen)} segments"
        )

    def said(self) -> "Growth":
        """What is used now has been reported."""
        return Growth(self.used_bytes, self.used_bytes[-1])
