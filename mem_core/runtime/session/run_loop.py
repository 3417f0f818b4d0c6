"""The loop of segments: the only one. The flow hands it Prefect tasks, tests hand it plain calls.

    while there are steps to do:
        decide what the segment runs with        (recorded before it is used)
        train it                                 (tries are inside; what comes out is committed work)
        take the verdict on the segment before it
        hand its save over to be proven          (at most one in flight; the next segment already trains)
        look at held-out rows                    (where that is due, beside the save; recorded once for each step)

A save that was handed over is always waited for, whatever ends the loop in good order: a segment that was reported as ended has a
checkpoint before its process exits. An order to stop is therefore obeyed only after the verdict in flight is in.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from mem_core.core.recovery.actions import Action, Evaluate, Finish, GiveUp, Pause, Retry, Train
from mem_core.domain.errors import InternalError, Interrupted, MemError
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted
from mem_core.runtime.session.checkpoint_service import SaveResult


class LoopSession(Protocol):
    """What the loop asks of a session; `RunSession` is the one that trains."""

    def next_action(self) -> Action:
        """What is due now."""
        ...

    def evaluate(self, step: int) -> bool:
        """Look at the held-out rows after `step`, whose save may still be under way. False where it has to be done again."""
        ...

    def waiting_for_verdict(self) -> AbstractContextManager[None]:
        """Books the time of a block as waiting for a verdict."""
        ...

    def settle(self, result: SaveResult) -> None:
        """Take a save's result into account. Raises the error that ends the run, if it comes to that."""
        ...

    def interrupted(self) -> Interrupted:
        """The error of an attempt that was asked to stop."""
        ...

    def finish(self) -> None:
        """After the last step was proven."""
        ...


class Pending(Protocol):
    """A save that is being proven somewhere: a `concurrent.futures.Future`, or a Prefect future."""

    def result(self) -> SaveResult:
        """Wait for its verdict."""
        ...


TrainSegment = Callable[[Train], SegmentCompleted | SegmentInterrupted]
SubmitSave = Callable[[int], Pending]


def run_loop(session: LoopSession, train: TrainSegment, submit: SubmitSave) -> None:
    """Segments until every step is applied and proven.

    `train` decides and trains one segment and comes back with its outcome, after as many tries as `session` allowed; `submit` begins
    to prove the save of a step and returns at once.

    Raises:
        Interrupted: the run was asked to stop; what had ended is committed. MemError: every other ending that is not completion.
    """
    in_flight: list[Pending] = []
    try:
        _segments(session, train, submit, in_flight)
    except MemError:
        for pending in in_flight:  # what had ended before is committed, whatever came after it
            with contextlib.suppress(MemError):
                pending.result()
        raise
    session.finish()


def _segments(session: LoopSession, train: TrainSegment, submit: SubmitSave, in_flight: list[Pending]) -> None:
    # Bounded: a segment either advances the validated step or is a failure, and the orchestrator counts failures.
    while True:
        action = session.next_action()
        match action:
            case Train():
                outcome = train(action)
                _settle(session, in_flight)
                in_flight.append(submit(outcome.to_step))
            case Evaluate():
                if not session.evaluate(action.step):
                    _settle(session, in_flight)  # the workers are gone: what they had saved decides where work goes on
            case Finish() | Pause() if in_flight:
                _settle(session, in_flight)  # a bad verdict sends us back: ask again
            case Finish():
                return
            case Pause():
                raise session.interrupted()
            case Retry() | GiveUp():
                raise InternalError(f"unexpected action {action}", remedy="Report this as a bug.")


def _settle(session: LoopSession, in_flight: list[Pending]) -> None:
    """Wait for the verdict in flight and take it into account; a bad one changes where the next segment starts."""
    while in_flight:
        with session.waiting_for_verdict():
            result = in_flight.pop().result()
        session.settle(result)
