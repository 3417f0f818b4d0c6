"""What people see of a preparation: its phase, how much of that is done, and about how long it still takes."""

import time
from collections.abc import Callable

from mem_core.infrastructure.telemetry.live import Rate
from mem_core.infrastructure.telemetry.progress import PreparingView, Progress
from mem_core.runtime.data.values import PrepareProgress

_PHASES = {"hashing": "reading and hashing", "tokenizing": "encoding and packing", "writing": "writing and checking"}
_KNOWN_AFTER_S = 3.0
_SPAN_S = 20.0


class PreparingWatch:
    """Called with each word of the tokenising process; a phase has a rate of its own."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._clock = clock
        self._phase = ""
        self._began_s = 0.0
        self._rate = Rate(_SPAN_S)

    def __call__(self, done: PrepareProgress) -> None:
        """Hand it on."""
        if done.note:
            self._progress.note(done.note)
            return
        now_s = self._clock()
        if done.phase != self._phase:
            self._phase, self._began_s, self._rate = done.phase, now_s, Rate(_SPAN_S)
        self._rate.add(now_s, done.bytes_done)
        left_s = self._rate.eta_s(done.bytes_total - done.bytes_done) if now_s - self._began_s >= _KNOWN_AFTER_S else None
        self._progress.update(
            PreparingView(
                done_bytes=done.bytes_done, total_bytes=done.bytes_total, num_rows=done.rows, num_tokens=done.tokens,
                phase=_PHASES[done.phase], left_s=left_s,
            )
        )  # fmt: skip
