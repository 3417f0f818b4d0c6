"""Asking without waiting: a planner is asked while a segment trains, and its answer is picked up between segments."""

import threading

from mem_core.domain.advice import Planner, TelemetrySummary
from mem_core.domain.directive import Refusal


class _Question:
    """One question and its answer; a late answer stays here and is never taken for that of a newer question."""

    def __init__(self, planner: Planner, summary: TelemetrySummary) -> None:
        self.answered = threading.Event()
        self.answer: bytes | Refusal | None = Refusal(reason="planner_failed", detail="the planner ended without an answer")
        self._planner = planner
        self._summary = summary

    def run(self) -> None:
        try:
            self.answer = self._planner.advise(self._summary)
        except Exception as exc:  # noqa: BLE001 - advice never crashes a run (I7); the text of a foreign error may hold secrets
            self.answer = Refusal(reason="planner_failed", detail=f"the planner raised {type(exc).__name__}")
        finally:
            self.answered.set()


class BackgroundAdvice:
    """Runs a planner in a daemon thread, at most one at a time, and never waits longer than it was told to."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._question: _Question | None = None
        self._busy = False

    def ask(self, summary: TelemetrySummary) -> None:
        """Start a question. While an older one is still unanswered no new thread is started: `collect` then says `busy`."""
        self._busy = self._question is not None and not self._question.answered.is_set()
        if self._busy:
            return
        self._question = _Question(self._planner, summary)
        threading.Thread(target=self._question.run, name="planner", daemon=True).start()

    def collect(self, time_limit_s: float) -> bytes | Refusal | None:
        """The answer to the newest question, waiting at most `time_limit_s`; None where nothing was asked or advised."""
        question = self._question
        if question is None:
            return None
        if self._busy:
            return Refusal(reason="busy", detail="the planner was still at an older question")
        if not question.answered.wait(max(time_limit_s, 0.0)):
            return Refusal(reason="late", detail=f"no answer within {time_limit_s:g} s")
        self._question = None
        return question.answer
