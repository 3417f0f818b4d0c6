"""Which runs this process drives, so that tasks get small names instead of live objects."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from mem_core.bootstrap import RunDraft
from mem_core.domain.errors import InternalError, Interrupted
from mem_core.runtime.session.run_session import RunSession

ECHO_S = 1.0
_DRAFTS: dict[str, RunDraft] = {}


@contextlib.contextmanager
def driving(draft: RunDraft) -> Iterator[str]:
    """Register a run for the length of the block; yields the key that tasks are called with."""
    key = draft.request.run_id
    _DRAFTS[key] = draft
    try:
        yield key
    finally:
        _DRAFTS.pop(key, None)


def draft_of(key: str) -> RunDraft:
    """The run behind a key.

    Raises:
        InternalError: a task ran outside of its flow.
    """
    if key not in _DRAFTS:
        raise InternalError(f"no run {key} is driven by this process", remedy="Call the flow, not its tasks.")
    return _DRAFTS[key]


def session_of(key: str) -> RunSession:
    """The opened session behind a key."""
    session = draft_of(key).session
    if session is None:
        raise InternalError(f"run {key} is not open yet", remedy="Call the flow, not its tasks.")
    return session


@contextlib.contextmanager
def stopping_by_signal(draft: RunDraft) -> Iterator[None]:
    """SIGTERM and SIGINT end the segment at the next step and commit; while the run is still being opened they are obeyed at once.

    The same signal again, later than the echo of the first one, is obeyed at once; a terminal's SIGINT with a runner's SIGTERM
    after it is one wish, not two. Does nothing outside the main thread, where Python allows no handlers; cancel then comes
    through the flow run's state.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler(draft)
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    _HANDLERS.append(handler)
    try:
        yield
    finally:
        _HANDLERS.remove(handler)
        for number, previous in before.items():
            signal.signal(number, previous)


class _Handler:
    def __init__(self, draft: RunDraft) -> None:
        self.draft = draft
        self._first_s: dict[int, float] = {}
        self._raised = False
        self.waiting = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        name, now_s = signal.Signals(number).name, time.monotonic()
        if now_s - self._first_s.setdefault(number, now_s) > ECHO_S:
            raise KeyboardInterrupt(f"second {name}")
        stop = self.draft.stop
        stop.by = stop.by or name
        if self.at_once and not self._raised:
            self._raised = True
            raise Interrupted(f"stopped by {stop.by} outside of a segment", remedy="The same command goes on from there.")

    @property
    def at_once(self) -> bool:
        """Whether nothing would notice the stop flag for long, and nothing is lost by leaving."""
        return self.draft.session is None or self.waiting


_HANDLERS: list[_Handler] = []


def interrupt_opening() -> None:
    """From another thread: what a SIGTERM does to a run that is being opened or waits for a person; nothing where it trains."""
    if any(handler.at_once for handler in _HANDLERS):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


@contextlib.contextmanager
def waiting_for_a_person(draft: RunDraft) -> Iterator[None]:
    """Within the block a signal is obeyed at once, since nothing looks at the stop flag."""
    handlers = [handler for handler in _HANDLERS if handler.draft is draft]
    for handler in handlers:
        handler.waiting = True
    try:
        yield
    finally:
        for handler in handlers:
            handler.waiting = False
