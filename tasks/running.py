"""Which runs this process drives, so that tasks get small names instead of live objects."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from mem_core.bootstrap import RunDraft
from mem_core.domain.errors import InternalError
from mem_core.runtime.session.run_session import RunSession
from mem_core.runtime.session.segment_service import StopFlag

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
def stopping_by_signal(stop: StopFlag) -> Iterator[None]:
    """SIGTERM and SIGINT end the segment at the next step and commit; a second one is obeyed at once.

    Does nothing outside the main thread, where Python allows no handlers; cancel then comes through the flow run's state.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        if stop:
            raise KeyboardInterrupt(f"second {signal.Signals(number).name}")
        stop.by = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
