"""Drives a run to its end as the flow does, without Prefect: for tests that are about training and not about the flow."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mem_core import bootstrap
from mem_core.core.recovery.actions import Train
from mem_core.domain.request import RuntimeRequest
from mem_core.domain.run import RunResult
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.telemetry.progress import NoProgress, Progress
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.runtime.session.opening.stages import OpeningOptions, Prepared, RunOrder, Stage, close_stage
from mem_core.runtime.session.run_loop import run_loop
from mem_core.runtime.session.run_session import RetrySegment, RunSession

BeforeSegment = Callable[[RunSession, Train], None]


def drive(
    request: RuntimeRequest,
    *,
    options: OpeningOptions | None = None,
    prepared: Callable[[Prepared], None] = lambda stage: None,
    before_segment: BeforeSegment = lambda session, segment: None,
    progress: Progress | None = None,
    settings: Settings | None = None,
    server: ForkServer | None = None,
) -> RunResult:
    """Run one attempt to its end and return the result; errors pass through after everything was closed.

    `prepared` sees the run once it is wired, `before_segment` each segment before it trains: tests hook in there. A `server` that is
    given is used and left running, so that many tests pay for the heavy imports once.
    """
    options = options or OpeningOptions()
    if server is not None:
        options = replace(options, server=BorrowedServer.of(server))
    stage: Stage = RunOrder(request, settings or Settings.from_environment(), progress or NoProgress(), options=options)
    error: BaseException | None = None
    try:
        stage = examined = bootstrap.examine(stage)
        stage = held = bootstrap.acquire(examined)
        stage = ready = bootstrap.prepare(held)
        prepared(ready)
        _train(ready.session, before_segment)
    except BaseException as exc:
        error = exc
        raise
    finally:
        close_stage(stage, error)
    return ready.session.result()


def _train(session: RunSession, before_segment: BeforeSegment) -> None:
    def train(segment: Train) -> SegmentCompleted | SegmentInterrupted:
        session.decide(segment)
        before_segment(session, segment)
        return _tries(session, segment)

    with ThreadPoolExecutor(1) as saver:
        run_loop(session, train, lambda step: saver.submit(session.complete_save, step))


def _tries(session: RunSession, segment: Train) -> SegmentCompleted | SegmentInterrupted:
    for number in range(1, 1_000):
        try:
            return session.train_segment(segment.segment_index, segment.until_step, number)
        except RetrySegment:
            continue
    raise AssertionError("the orchestrator bounds the tries")


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
