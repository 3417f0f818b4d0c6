"""How fast a run goes, and the small file by which another process sees where it is right now.

    RUN/live.json    rewritten about once a second while steps are done, removed at the attempt's end

The file is for people only. Nothing is decided by it, it is not made durable, and whoever reads it asks the lease whether its writer
still lives.
"""

import contextlib
import os
from pathlib import Path

from pydantic import ValidationError

from mem_core.domain.run import LiveStep
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_regular

LIVE_NAME = "live.json"
RATE_SPAN_S = 60.0


class Rate:
    """How much of something a second over the last minute or two, pauses included. A count that falls (work done again) starts anew."""

    def __init__(self, span_s: float = RATE_SPAN_S) -> None:
        self._span_s = span_s
        self._from: tuple[float, int] | None = None
        self._middle: tuple[float, int] | None = None
        self._now: tuple[float, int] | None = None

    def add(self, now_s: float, count: int) -> None:
        """`count` had been reached at `now_s` of a monotonic clock."""
        if self._from is None or self._middle is None or self._now is None or count < self._now[1]:
            self._from = self._middle = (now_s, count)
        elif now_s - self._middle[0] > self._span_s:
            self._from, self._middle = self._middle, (now_s, count)
        self._now = (now_s, count)

    def per_s(self) -> float | None:
        """None before two different counts are known."""
        if self._from is None or self._now is None:
            return None
        done, duration_s = self._now[1] - self._from[1], self._now[0] - self._from[0]
        return done / duration_s if done > 0 and duration_s > 0 else None

    def eta_s(self, num_left: int) -> float | None:
        """Seconds until `num_left` more are done at this rate."""
        per_s = self.per_s()
        return max(num_left, 0) / per_s if per_s else None


def about_left(left_s: float | None) -> str:
    """`about 2 min left`, as exact as it can be meant; empty where it is not known."""
    if left_s is None:
        return ""
    if left_s < 90:
        return f"about {max(5, round(left_s / 5) * 5)} s left"
    return f"about {round(left_s / 60)} min left" if left_s < 5_400 else f"about {left_s / 3_600:.1f} h left"


def write_live(run_folder: Path, live: LiveStep) -> None:
    """Replace the file. What goes wrong is nobody's trouble: the next second tries again."""
    temporary = run_folder / f".{LIVE_NAME}.{os.getpid()}"
    with contextlib.suppress(OSError):
        temporary.write_text(live.model_dump_json(), encoding="utf-8")
        temporary.replace(run_folder / LIVE_NAME)


def remove_live(run_folder: Path) -> None:
    """At the end of an attempt."""
    with contextlib.suppress(OSError):
        (run_folder / LIVE_NAME).unlink()


def read_live(run_folder: Path) -> LiveStep | None:
    """What was last written; None where nothing is there or it cannot be read."""
    try:
        return LiveStep.model_validate_json(read_regular(run_folder / LIVE_NAME, RECORD_LIMIT_BYTES))
    except (OSError, ValidationError):
        return None
