"""Progress of a preparation, at most a few times a second."""

import time
from collections.abc import Callable
from typing import Literal

from mem_core.runtime.data.values import OnProgress, PrepareProgress

_PROGRESS_EVERY_S = 0.2
Phase = Literal["hashing", "tokenizing", "writing"]


class Reporter:
    """One for a preparation. `bytes_total` counts the files; the last phase has a total of its own."""

    def __init__(self, on_progress: OnProgress, bytes_total: int) -> None:
        self._on_progress = on_progress
        self._total = bytes_total
        self._done = 0
        self._next_s = 0.0
        self._phase = ""

    def advance(self, phase: Phase, size_bytes: int, counts: Callable[[], dict[str, int]] = dict) -> None:
        """Count bytes of a phase; a new phase starts from zero. `counts` is asked only when there is something to say."""
        fresh = phase != self._phase
        self._done = size_bytes if fresh else self._done + size_bytes
        self._phase = phase
        now_s = time.monotonic()
        if fresh or now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_EVERY_S
            done = PrepareProgress(phase=phase, bytes_done=min(self._done, self._total), bytes_total=self._total)
            self._on_progress(done.model_copy(update=counts()))

    def begin(self, phase: Phase, bytes_total: int) -> None:
        """The next phase, of so many bytes."""
        self._total = bytes_total
        self.advance(phase, 0)

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        phase: Phase = "tokenizing" if self._phase == "tokenizing" else "hashing"
        self._on_progress(PrepareProgress(phase=phase, bytes_done=min(self._done, self._total), bytes_total=self._total, note=text))

    def finish(self, phase: Phase, counts: Callable[[], dict[str, int]] = dict) -> None:
        """The last word on a phase: all bytes done."""
        done = PrepareProgress(phase=phase, bytes_done=self._total, bytes_total=self._total)
        self._on_progress(done.model_copy(update=counts()))
