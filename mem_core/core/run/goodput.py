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
from mem_core.domain.run import BETWEEN_ATTEMPTS, GOODPUT_BUCKETS, Goodput


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

    After an orderly end no attempt lives until the next one starts: `between_attempts`, outside the fraction, since nobody had asked
    for the run to go on. An attempt that was killed had lived at least until its last line, and may have worked for as long as the
    longest stretch that was ever measured in one go: that much of the hole is `restart`, the rest is between attempts as well.
    A ledger that began before its `attempt_started` line shortens the hole before it, so nothing counts twice.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._covered_until_s: float | None = None
        self._alive_until_s = -math.inf
        self._longest_stretch_s = 0.0
        self._lost_hole_s = 0.0
        self._dead_hole_s = 0.0

    def alive(self, time_s: float) -> None:
        """A line of any kind: its writer lived at `time_s`."""
        if math.isfinite(time_s):
            self._alive_until_s = time_s

    def attempt_started(self, time_s: float, *, previous_killed: bool) -> None:
        """A process took over at `time_s` (Unix seconds)."""
        self._close_holes()
        hole_s = self._uncovered(time_s)
        known_s = self._alive_until_s - self._covered_until_s if self._covered_until_s is not None else 0.0
        self._lost_hole_s = min(hole_s, max(0.0, known_s, self._longest_stretch_s)) if previous_killed else 0.0
        self._dead_hole_s = hole_s - self._lost_hole_s
        self._cover(time_s)

    def time_spent(self, time_s: float, seconds: Mapping[str, float]) -> None:
        """A process measured `seconds` up to `time_s`. What is not a finite positive number is left out.

        Inside an attempt the measured seconds are believed and not the time of day, which may jump.
        """
        usable = {name: value for name, value in seconds.items() if math.isfinite(value) and value > 0}
        total_s = sum(usable.values())
        before_start_s = max(0.0, total_s - self._uncovered(time_s))
        from_dead_s = min(self._dead_hole_s, before_start_s)
        self._dead_hole_s -= from_dead_s
        self._lost_hole_s = max(0.0, self._lost_hole_s - (before_start_s - from_dead_s))
        self._close_holes()
        self._longest_stretch_s = max(self._longest_stretch_s, total_s)
        for name, value in usable.items():
            self._add(name, value)
        self._cover(time_s)

    def attempt_ended(self, time_s: float) -> None:
        """An orderly end at `time_s`."""
        self._close_holes()
        self._add("idle", self._uncovered(time_s))
        self._cover(time_s)

    def total(self) -> Goodput:
        """Seconds by bucket in the order of GOODPUT_BUCKETS (unknown names last), and the productive fraction of what an attempt lived."""
        seconds = dict(self._seconds)
        for bucket, hole_s in (("restart", self._lost_hole_s), (BETWEEN_ATTEMPTS, self._dead_hole_s)):
            if hole_s > 0:
                seconds[bucket] = seconds.get(bucket, 0.0) + hole_s
        names = [*(name for name in GOODPUT_BUCKETS if name in seconds), *(name for name in seconds if name not in GOODPUT_BUCKETS)]
        goodput = Goodput(seconds={name: seconds[name] for name in names})
        lived_s = goodput.lived_s
        return goodput.model_copy(update={"fraction": seconds.get("productive", 0.0) / lived_s if lived_s > 0 else 0.0})

    def _uncovered(self, time_s: float) -> float:
        if self._covered_until_s is None or not math.isfinite(time_s):
            return 0.0
        return max(0.0, time_s - self._covered_until_s)

    def _cover(self, time_s: float) -> None:
        if math.isfinite(time_s):
            self._covered_until_s = time_s
            self._alive_until_s = max(self._alive_until_s, time_s)

    def _close_holes(self) -> None:
        self._add("restart", self._lost_hole_s)
        self._add(BETWEEN_ATTEMPTS, self._dead_hole_s)
        self._lost_hole_s = self._dead_hole_s = 0.0

    def _add(self, bucket: str, duration_s: float) -> None:
        if duration_s > 0:
            self._seconds[bucket] = self._seconds.get(bucket, 0.0) + duration_s
