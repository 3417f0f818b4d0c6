"""The mirror's thread: uploads while training goes on, tells what fails, never raises into training."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mem_core.domain.errors import InternalError, RunHeld, StoreUnavailable
from mem_core.domain.events import CheckpointMirrored, Event, Noted
from mem_core.runtime.checkpoint_manager.mirror.mirror import Mirror


@dataclass(frozen=True)
class MirrorState:
    """How far the mirror is. `behind` are steps that wait or failed and are tried again with the next push."""

    newest_step: int | None = None
    behind: tuple[int, ...] = ()
    last_error: str = ""


class BackgroundMirror:
    """Pushes in one thread, newest first wanted: at most one upload in flight and one waiting. Never raises into training."""

    def __init__(self, mirror: Mirror, emit: Callable[[Event], object]) -> None:
        self._mirror, self._emit = mirror, emit
        self._changed = threading.Condition()
        self._waiting: tuple[int, Path] | None = None
        self._running: tuple[int, Path] | None = None
        self._state = MirrorState()
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(self, step: int, folder: Path) -> None:
        """Mirror this validated checkpoint soon. One that still waits is passed over in favour of this newer one (said in the journal)."""
        with self._changed:
            if self._waiting is not None:
                self._emit(Noted(text=f"mirror is behind: step {self._waiting[0]} is passed over for step {step}"))
            self._waiting = (step, folder)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mem-mirror", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def held(self) -> frozenset[int]:
        """Steps whose local copy must stay until the remote is proven: give this to the manager."""
        with self._changed:
            return frozenset(item[0] for item in (self._waiting, self._running) if item is not None)

    def state(self) -> MirrorState:
        """How far the mirror is."""
        with self._changed:
            behind = tuple(sorted(item[0] for item in (self._waiting, self._running) if item is not None))
            return replace(self._state, behind=behind)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight or waiting. False if time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._running is None, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish what waits, within the time, then end the thread. False if something was left behind."""
        finished = self.drain(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and finished:
            self._thread.join(timeout_s)
        return finished

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._closing:
                    return
                self._running, self._waiting = self._waiting, None
                step, folder = self._running or (0, Path())
            error = self._try(step, folder)
            with self._changed:
                self._running = None
                newest = self._state.newest_step if error else step
                self._state = MirrorState(newest_step=newest, last_error=error)
                self._changed.notify_all()

    def _try(self, step: int, folder: Path) -> str:
        """One push and one rotation; returns what went wrong, which is told and never raised."""
        try:
            self._mirror.push(folder)
        except (StoreUnavailable, RunHeld, InternalError, OSError, ValueError) as exc:
            self._emit(Noted(text=f"step {step} was not mirrored, training goes on: {exc}"))
            self._emit(CheckpointMirrored(step=step, url=self._mirror.url, problem=str(exc)[:500] or type(exc).__name__))
            return str(exc)
        self._emit(Noted(text=f"step {step} mirrored to {self._mirror.url}"))
        self._emit(CheckpointMirrored(step=step, url=self._mirror.url))
        return self._rotate()

    def _rotate(self) -> str:
        """The copy is there: that older ones could not be removed says nothing about it."""
        try:
            self._mirror.rotate()
        except (StoreUnavailable, RunHeld, InternalError, OSError, ValueError) as exc:
            self._emit(Noted(text=f"old copies in {self._mirror.url} were not removed, this is tried again: {exc}"))
            return str(exc)
        return ""
