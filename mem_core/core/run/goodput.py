"""Goodput: every second of a run in exactly one bucket, measured inside a process and folded over attempts.

`GoodputLedger` measures while a process drives the run. `WallTimeFold` adds what no process could measure: the time between
attempts, and the unrecorded tail of one that was killed.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from mem_core.domain.errors import InternalError
from mem_core.domain.events import TimeSpent
from mem_core.domain.run import GOODPUT_BUCKETS, Goodput


class GoodputLedger:
    """A stopwatch that is always in exactly one bucket, so that the sum is the wall time by construction.

    Not safe for several threads: it belongs to the one thread that drives the run.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, bucket: str = "start") -> None:
        self._clock = clock
        self._bucket = _known(bucket)
        self._since_s = clock()
        self._seconds: dict[str, float] = {}

    @property
    def current(self) -> str:
        """The bucket that time runs into now."""
        return self._bucket

    def enter(self, bucket: str) -> str:
        """From now on time runs into `bucket`; returns the bucket that was left.

        Raises:
            InternalError: no such bucket.
        """
        _known(bucket)
        self._settle()
        left, self._bucket = self._bucket, bucket
        return left

    @contextmanager
    def bucket(self, bucket: str) -> Generator[None]:
        """Time inside the block runs into `bucket`, also when it raises; blocks nest and the innermost one counts."""
        left = self.enter(bucket)
        try:
            yield
        finally:
            self.enter(left)

    def move(self, source: str, target: str, duration_s: float) -> float:
        """Book seconds since the last drain from one bucket to another, at most what `source` holds; returns what was moved.

        For time whose meaning shows only afterwards: a segment runs into `productive`, and its redone share is moved later.
        """
        _known(target)
        self._settle()
        moved = min(max(duration_s, 0.0), self._seconds.get(_known(source), 0.0))
        if moved > 0:
            self._seconds[source] -= moved
            self._seconds[target] = self._seconds.get(target, 0.0) + moved
        return moved

    def drain(self) -> TimeSpent:
        """The seconds since the last drain, for the journal. Drain at least once per segment, and before `run_ended`."""
        self._settle()
        seconds, self._seconds = self._seconds, {}
        return TimeSpent(seconds={name: value for name, value in seconds.items() if value > 0})

    def _settle(self) -> None:
        now_s = self._clock()
        self._seconds[self._bucket] = self._seconds.get(self._bucket, 0.0) + max(0.0, now_s - self._since_s)
        self._since_s = now_s


def _known(bucket: str) -> str:
    if bucket not in GOODPUT_BUCKETS:
        raise InternalError(
            "no such goodput bucket", field="bucket", value=bucket, bound=", ".join(GOODPUT_BUCKETS), remedy="Report this as a bug."
        )
    return bucket


def split_productive(from_step: int, to_step: int, highest_step: int, duration_s: float) -> tuple[float, float]:
    """Seconds of a segment as (productive, redone): steps at or below the highest step ever done were redone.

    `from_step` is exclusive and `to_step` inclusive; every step of a segment is taken to cost the same.
    """
    num_steps = to_step - from_step
    if num_steps <= 0:
        return 0.0, duration_s
    num_redone = min(max(highest_step - from_step, 0), num_steps)
    redone_s = duration_s * num_redone / num_steps
    return duration_s - redone_s, redone_s


class WallTimeFold:
    """Adds up `time_spent` over attempts and fills the holes between them.

    A killed attempt's time after its last `time_spent` and until the next attempt starts is `restart`; after an orderly end
    it is `idle`. A ledger that began before its `attempt_started` line shortens the hole before it, so nothing counts twice.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._covered_until_s: float | None = None
        self._hole_s = 0.0
        self._hole_bucket = "idle"

    def attempt_started(self, time_s: float, *, previous_killed: bool) -> None:
        """A process took over at `time_s` (Unix seconds)."""
        self._close_hole()
        self._hole_s = self._uncovered(time_s)
        self._hole_bucket = "restart" if previous_killed else "idle"
        self._cover(time_s)

    def time_spent(self, time_s: float, seconds: Mapping[str, float]) -> None:
        """A process measured `seconds` up to `time_s`. What is not a finite positive number is left out.

        Inside an attempt the measured seconds are believed and not the time of day, which may jump.
        """
        usable = {name: value for name, value in seconds.items() if math.isfinite(value) and value > 0}
        before_start_s = sum(usable.values()) - self._uncovered(time_s)
        self._hole_s = max(0.0, self._hole_s - max(0.0, before_start_s))
        self._close_hole()
        for name, value in usable.items():
            self._add(name, value)
        self._cover(time_s)

    def attempt_ended(self, time_s: float) -> None:
        """An orderly end at `time_s`."""
        self._close_hole()
        self._add("idle", self._uncovered(time_s))
        self._cover(time_s)

    def total(self) -> Goodput:
        """Seconds by bucket in the order of GOODPUT_BUCKETS (unknown names last), and the productive fraction."""
        seconds = dict(self._seconds)
        if self._hole_s > 0:
            seconds[self._hole_bucket] = seconds.get(self._hole_bucket, 0.0) + self._hole_s
        names = [*(name for name in GOODPUT_BUCKETS if name in seconds), *(name for name in seconds if name not in GOODPUT_BUCKETS)]
        wall_s = sum(seconds.values())
        return Goodput(
            fraction=seconds.get("productive", 0.0) / wall_s if wall_s > 0 else 0.0, seconds={name: seconds[name] for name in names}
        )

    def _uncovered(self, time_s: float) -> float:
        if self._covered_until_s is None or not math.isfinite(time_s):
            return 0.0
        return max(0.0, time_s - self._covered_until_s)

    def _cover(self, time_s: float) -> None:
        if math.isfinite(time_s):
            self._covered_until_s = time_s

    def _close_hole(self) -> None:
        self._add(self._hole_bucket, self._hole_s)
        self._hole_s = 0.0

    def _add(self, bucket: str, duration_s: float) -> None:
        if duration_s > 0:
            self._seconds[bucket] = self._seconds.get(bucket, 0.0) + duration_s
