"""The loop of segments: what ended is committed before any ending, and an order to stop never undoes what is finished."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from mem_core.core.recovery.actions import Action, Progress, Train
from mem_core.core.recovery.mem_orchestrator import MemOrchestrator
from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.errors import Interrupted, NoProgress
from mem_core.domain.segment import SegmentCompleted, SegmentInterrupted
from mem_core.runtime.session.checkpoint_service import SaveResult
from mem_core.runtime.session.run_loop import run_loop
from mem_core.runtime.session.stop_flag import StopFlag

ORCHESTRATOR = MemOrchestrator(max_steps=3, segment_steps=1, max_failures_without_progress=3)


@dataclass
class ScriptedSession:
    """A session whose segments are one step long and whose saves are proven when the loop asks for the verdict."""

    stop: StopFlag = field(default_factory=StopFlag)
    bad_verdicts: list[int] = field(default_factory=list)
    position: int = 0
    validated: int = 0
    told: list[str] = field(default_factory=list)
    during: Callable[[int], None] = lambda step: None

    def next_action(self) -> Action:
        progress = Progress(applied_steps=self.position, validated_step=self.validated, stop_by=self.stop.by)
        return ORCHESTRATOR.next_action(progress, None)

    def train(self, segment: Train) -> SegmentCompleted | SegmentInterrupted:
        self.during(segment.until_step)
        self.position = segment.until_step
        self.told.append(f"trained {segment.until_step}")
        return SegmentCompleted(
            from_step=segment.from_step, to_step=segment.until_step, batch_index=segment.until_step, loss_first=1.0, loss_last=1.0,
            tokens=8, duration_s=0.1, trajectory_digest="0" * 64,
        )  # fmt: skip

    def submit(self, step: int) -> "Future[SaveResult]":
        bad = step in self.bad_verdicts
        if bad:
            self.bad_verdicts.remove(step)
        verdict = CheckpointVerdict(step=step, level="integrity", valid=not bad, manifest_sha256="0" * 64)
        future: Future[SaveResult] = Future()
        future.set_result(SaveResult(step, verdict))
        return future

    def waiting_for_verdict(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def settle(self, result: SaveResult) -> None:
        self.told.append(f"{'proven' if result.valid else 'bad'} {result.step}")
        if result.valid:
            self.validated = result.step
        else:
            self.position = self.validated

    def interrupted(self) -> Interrupted:
        return Interrupted(f"stopped by {self.stop.by} at validated step {self.validated}", remedy="")

    def finish(self) -> None:
        self.told.append("finished")


def test_each_verdict_is_taken_while_the_next_segment_has_trained() -> None:
    session = ScriptedSession()
    run_loop(session, session.train, session.submit)
    assert session.told == ["trained 1", "trained 2", "proven 1", "trained 3", "proven 2", "proven 3", "finished"]


def test_a_stop_in_the_last_step_of_a_segment_comes_after_its_checkpoint() -> None:
    session = ScriptedSession()
    session.during = lambda step: session.stop.ask("SIGTERM") if step == 2 else None
    with pytest.raises(Interrupted, match="at validated step 2"):
        run_loop(session, session.train, session.submit)
    assert session.told == ["trained 1", "trained 2", "proven 1", "proven 2"]


def test_a_stop_in_the_last_step_of_the_run_is_a_completion() -> None:
    session = ScriptedSession()
    session.during = lambda step: session.stop.ask("SIGTERM") if step == 3 else None
    run_loop(session, session.train, session.submit)
    assert session.told[-2:] == ["proven 3", "finished"]


def test_a_stop_before_the_first_segment_trains_nothing() -> None:
    session = ScriptedSession()
    session.stop.ask("SIGINT")
    session.stop.ask("SIGTERM")
    with pytest.raises(Interrupted, match="stopped by SIGINT at validated step 0"):
        run_loop(session, session.train, session.submit)
    assert session.told == []


def test_a_last_checkpoint_that_is_bad_is_done_again() -> None:
    session = ScriptedSession(bad_verdicts=[3])
    run_loop(session, session.train, session.submit)
    assert session.told[-4:] == ["bad 3", "trained 3", "proven 3", "finished"]


def test_an_error_in_a_segment_waits_for_the_save_before_it() -> None:
    session = ScriptedSession()
    asked: list[int] = []

    class Slow(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> SaveResult:
            asked.append(1)
            return super().result(timeout)

    def submit(step: int) -> "Future[SaveResult]":
        future: Future[SaveResult] = Slow()
        future.set_result(session.submit(step).result())
        return future

    def fail(step: int) -> None:
        if step == 2:
            raise NoProgress("it fails", remedy="")

    session.during = fail
    with pytest.raises(NoProgress):
        run_loop(session, session.train, submit)
    assert asked == [1]
