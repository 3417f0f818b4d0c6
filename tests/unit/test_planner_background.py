"""Advice in the background: never later than allowed, never an exception, never an old answer for a new question."""

import threading
import time

import pytest

from mem_core.domain.advice import TelemetrySummary
from mem_core.domain.directive import Refusal
from mem_core.domain.plan import Hyperparams
from mem_core.domain.policy import BUILT_IN_BOUNDS
from mem_core.infrastructure.planner.background import BackgroundAdvice
from mem_core.infrastructure.planner.none import NoPlanner


def summary(segment_index: int = 1) -> TelemetrySummary:
    return TelemetrySummary(
        segment_index=segment_index,
        applied_steps=1,
        max_steps=9,
        current=Hyperparams(),
        base=Hyperparams(),
        bounds=BUILT_IN_BOUNDS.cpu,
    )


class Gated:
    """Answers with the segment's number once it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def advise(self, summary: TelemetrySummary) -> bytes:
        self.gate.wait(30)
        return str(summary.segment_index).encode()


class Raising:
    """Breaks its promise never to raise, with a secret in the text."""

    def advise(self, summary: TelemetrySummary) -> bytes:
        raise RuntimeError("sk-canary-in-an-exception")


def test_an_answer_is_picked_up_once() -> None:
    planner = Gated()
    planner.gate.set()
    advice = BackgroundAdvice(planner)
    assert advice.collect(5) is None
    advice.ask(summary(4))
    assert advice.collect(5) == b"4"
    assert advice.collect(5) is None


def test_a_slow_planner_is_late_and_its_answer_never_counts_for_a_newer_question() -> None:
    planner = Gated()
    advice = BackgroundAdvice(planner)
    advice.ask(summary(1))
    started = time.monotonic()
    late = advice.collect(0.05)
    assert time.monotonic() - started < 2
    assert isinstance(late, Refusal)
    assert late.reason == "late"
    advice.ask(summary(2))
    busy = advice.collect(5)
    assert isinstance(busy, Refusal)
    assert busy.reason == "busy"
    assert sum(thread.name == "planner" for thread in threading.enumerate()) == 1
    planner.gate.set()
    deadline = time.monotonic() + 10
    while any(thread.name == "planner" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.005)
    advice.ask(summary(3))
    assert advice.collect(5) == b"3"


def test_a_planner_that_raises_is_a_refusal_without_its_text() -> None:
    advice = BackgroundAdvice(Raising())
    advice.ask(summary())
    assert advice.collect(5) == Refusal(reason="planner_failed", detail="the planner raised RuntimeError")


@pytest.mark.parametrize("time_limit_s", [0.0, -1.0])
def test_no_time_at_all_is_still_an_answer(time_limit_s: float) -> None:
    planner = Gated()
    advice = BackgroundAdvice(planner)
    advice.ask(summary())
    answer = advice.collect(time_limit_s)
    planner.gate.set()
    assert isinstance(answer, Refusal)


def test_no_planner_gives_nothing() -> None:
    advice = BackgroundAdvice(NoPlanner())
    advice.ask(summary())
    assert advice.collect(5) is None
