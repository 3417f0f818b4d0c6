"""Drives a run to its end as the flow does, without Prefect: for tests that are about training and not about the flow."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mem_core import bootstrap
from mem_core.core.recovery.mem_orchestrator import Train
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.domain.segment import SegmentInterrupted
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import Progress
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.session.checkpoint_service import SaveResult
from mem_core.runtime.session.opening import RunDraft
from mem_core.runtime.session.run_session import RetrySegment, RunSession

BeforeSegment = Callable[[RunSession, Train], None]


def drive(
    request: RuntimeRequest,
    *,
    before_segment: BeforeSegment = lambda session, segment: None,
    prepared: Callable[[RunDraft], None] = lambda draft: None,
    progress: Progress | None = None,
    settings: Settings | None = None,
    server: ForkServer | None = None,
    allow_reshard: bool = False,
    drafted: Callable[[RunDraft], None] = lambda draft: None,
) -> RunResult:
    """Run one attempt to its end and return the result; errors pass through after everything was closed.

    `drafted` sees the draft before anything is touched, `prepared` once it is wired, `before_segment` each segment before it trains:
    tests hook in there. A `server` that is given is used and left running, so that many tests pay for the heavy imports once.
    """
    draft = bootstrap.draft_run(request, progress, settings, allow_reshard=allow_reshard)
    drafted(draft)
    draft.server = BorrowedServer.of(server) if server is not None else None
    error: BaseException | None = None
    try:
        bootstrap.examine(draft)
        bootstrap.acquire(draft)
        bootstrap.prepare(draft)
        prepared(draft)
        assert draft.session is not None
        _loop(draft.session, before_segment)
    except BaseException as exc:
        error = exc
        raise
    finally:
        draft.close(error)
    return draft.session.result()


class BorrowedServer(ForkServer):
    """Somebody else's fork server: forks from it, never ends it."""

    @classmethod
    def of(cls, server: ForkServer) -> "BorrowedServer":
        """A view of `server`."""
        view = cls.__new__(cls)
        view.__dict__.update(server.__dict__)
        return view

    def close(self) -> None:
        """Left to the owner."""


def _loop(session: RunSession, before_segment: BeforeSegment) -> None:
    pending: Future[SaveResult] | None = None
    with ThreadPoolExecutor(1) as saver:
        while True:
            segment = session.next_segment()
            if segment is None:
                pending = _settle(session, pending)
                if session.next_segment() is None:
                    break
                continue
            session.decide(segment)
            before_segment(session, segment)
            outcome = _train(session, segment)
            _settle(session, pending)
            pending = saver.submit(session.complete_save, outcome.to_step)
            if isinstance(outcome, SegmentInterrupted):
                _settle(session, pending)
                raise session.interrupted(outcome)
    session.finish()


def _settle(session: RunSession, pending: "Future[SaveResult] | None") -> None:
    if pending is not None:
        session.settle(pending.result())


def _train(session: RunSession, segment: Train):  # type: ignore[no-untyped-def]
    for number in range(1, 1_000):
        try:
            return session.train_segment(segment.segment_index, segment.until_step, number)
        except RetrySegment:
            continue
    raise AssertionError("next_action bounds the tries")


def main() -> None:
    """`python -m mem_core.testing.driver REQUEST.json`: drive in this process, so that a test can kill it."""
    import sys
    from pathlib import Path

    from mem_core.domain.errors import MemError

    try:
        result = drive(RuntimeRequest.model_validate_json(Path(sys.argv[1]).read_bytes()))
    except MemError as exc:
        print(exc, file=sys.stderr)
        sys.exit(exc.exit_code)
    print(result.model_dump_json())


if __name__ == "__main__":
    main()
