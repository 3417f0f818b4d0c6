"""One background thread that tells Prefect how a run goes. Training never waits for it and never fails because of it (I9)."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.prefect_view.api import ViewApi
from flows.prefect_view.board import RunBoard
from flows.prefect_view.curves import MAX_POINTS
from flows.prefect_view.news import event_of, log_line
from flows.prefect_view.page import Places, render_page, status_line
from flows.prefect_view.served import PREFIX
from flows.prefect_view.summary import render_summary
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.events import JournalLine
from mem_core.domain.printable import printable
from mem_core.domain.run import RunResult
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_regular
from mem_core.infrastructure.telemetry.progress import Progress, View
from mem_core.infrastructure.telemetry.report_page import REPORT_NAME

QUEUE_LIMIT = 2_000
TICK_S = 0.5
CLOSE_LIMIT_S = 8.0
FINAL_TRIES = 3
FINAL_PAUSE_S = 0.7
LOG_LIMIT = 2_000
EVENT_LIMIT = 5_000
PAGE_TRIES = 3

AnyLogger = logging.Logger | logging.LoggerAdapter[Any]


@dataclass(frozen=True)
class Pace:
    """How often what is done, in seconds. The page of a run that goes on for days is renewed less often: some thousand times in all."""

    publish_s: float = 10.0
    poll_s: float = 2.0
    stretch: float = 0.001

    def due_s(self, age_s: float) -> float:
        """Seconds between two renewals of the page of a run that has been shown for `age_s`."""
        return max(self.publish_s, age_s * self.stretch)


@dataclass
class PrefectView:
    """A `Progress` that shows to `inner` and, from its own thread, to Prefect. `follow` lets it read the journal as well."""

    inner: Progress
    api: ViewApi
    board: RunBoard
    log: AnyLogger
    ask_to_stop: Callable[[str], None]
    pace: Pace = field(default_factory=Pace)
    dropped: int = 0
    failed_calls: int = 0
    run_folder: str = ""
    _lines: "queue.Queue[JournalLine]" = field(default_factory=lambda: queue.Queue(QUEUE_LIMIT))
    _history: Callable[[], Iterable[JournalLine]] | None = None
    _view: View | None = None
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _published_s: float = float("-inf")
    _started_s: float = field(default_factory=time.monotonic)
    _polled_s: float = field(default_factory=time.monotonic)
    _asked: bool = False
    _introduced: bool = False
    _logged: int = 0
    _emitted: int = 0
    _attempt: int = 0
    _page: str = ""
    _page_tries: int = 0

    # -- what the run calls: cheap, never raises, never waits -------------------------------------------------------------

    def start(self) -> "PrefectView":
        """Begin to publish."""
        self._thread = threading.Thread(target=self._run, name="prefect-view", daemon=True)
        self._thread.start()
        return self

    def follow(self, state: StateManager) -> None:
        """Read the journal of earlier attempts (in the background) and hear of every line from now on."""
        self.run_folder, self._attempt = str(state.folder.absolute()), state.attempt
        state.listeners.append(self._hear)
        self._history = state.lines

    def _hear(self, line: JournalLine) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def update(self, view: View) -> None:
        """Only the newest view is kept."""
        self.inner.update(view)
        self._view = view

    def note(self, text: str) -> None:
        """To the inner display and, bounded, to the flow run's log."""
        self.inner.note(text)
        self._say("info", text)

    def close(self) -> None:
        """Publish the end and let go; a server that does not answer is waited for CLOSE_LIMIT_S at most."""
        self.inner.close()
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)

    # -- the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self.api:
            while not self._closing.wait(TICK_S):
                self._turn(final=False)
            for _ in range(FINAL_TRIES):  # a busy SQLite server says 503 now and then
                before = self.failed_calls
                self._turn(final=True)
                if self.failed_calls == before:
                    break
                time.sleep(FINAL_PAUSE_S)

    def _turn(self, final: bool) -> None:
        self._guard(self._fold)
        now_s = time.monotonic()
        if final or now_s - self._published_s >= self.pace.due_s(now_s - self._started_s):
            self._published_s = now_s
            if not self._introduced:
                self._guard(self._introduce)
            self._guard(self._publish)
        if not final and not self._asked and now_s - self._polled_s >= self.pace.poll_s:
            self._polled_s = now_s
            self._guard(self._poll)

    def _guard(self, action: Callable[[], None]) -> None:
        """Whatever goes wrong between here and the server is counted and said once; it must never reach the run."""
        try:
            action()
        except Exception as exc:  # noqa: BLE001 - telemetry never stops training
            self.failed_calls += 1
            if self.failed_calls == 1:
                with contextlib.suppress(Exception):
                    self.inner.note(f"Prefect could not be told ({type(exc).__name__}); training goes on")

    def _fold(self) -> None:
        """The view first, and only once: where both wait, the journal's line about the end of its segment is newer."""
        view, self._view = self._view, None
        if view is not None:
            self.board.add_view(view)
        if self._history is not None:
            history, self._history = self._history, None
            for line in history():
                self._take(line)
            if self._attempt > 1:
                self._guard(self._draw_past)
        while True:
            try:
                self._take(self._lines.get_nowait())
            except queue.Empty:
                break

    def _draw_past(self) -> None:
        from mem_core.infrastructure.telemetry.metrics import read_metrics

        columns = read_metrics(Path(self.run_folder) / "metrics")
        stride = len(columns["step"]) // (MAX_POINTS - 1) + 1  # thinned before it becomes Python objects
        drawn: list[list[Any]] = [columns[name][::stride].tolist() for name in ("step", "loss", "peak_bytes")]
        if drawn[0]:
            self.board.draw_past(*drawn)

    def _take(self, line: JournalLine) -> None:
        if not self.board.add_line(line) or line.attempt != self._attempt:
            return
        record = log_line(line)
        if record is not None:
            self._say(*record)
        event = event_of(line)
        if event is not None and self._emitted < EVENT_LIMIT:
            self._emitted += 1
            self.api.emit(event)

    def _introduce(self) -> None:
        self.api.introduce()
        self._introduced = True

    def _publish(self) -> None:
        key, places, line = f"mem-{self.board.run_id}", self._places(), status_line(self.board)
        self.api.put_artifact(key, "markdown", render_page(self.board, places), line)
        self.api.put_artifact(f"{key}-progress", "progress", round(self.board.percent, 2), line)
        self._publish_result(f"{key}-result", places, line)

    def _places(self) -> Places:
        if not self.run_folder:
            return Places()
        if not self._page and self._page_tries < PAGE_TRIES:
            self._page_tries += 1
            self._page = self.api.served_page(Path(self.run_folder))
        report = Path(self.run_folder) / REPORT_NAME
        report_file = report.as_uri() if report.exists() else ""
        return Places(self.run_folder, report_file, urlsplit(self._page).path, PREFIX if self._page else "")

    def _publish_result(self, key: str, places: Places, line: str) -> None:
        """At the end, for people and for whoever submitted the run from elsewhere."""
        path = Path(self.run_folder) / "result.json"
        if self.board.ended is not None and self.run_folder and path.exists():
            result = RunResult.model_validate_json(read_regular(path, RECORD_LIMIT_BYTES))
            result = result.model_copy(update={"report_url": self._page or result.report_url})
            self.api.put_artifact(key, "markdown", render_summary(result, self.board, places), line)

    def _poll(self) -> None:
        reason = self.api.stop_wanted()
        if reason:
            self._asked = True
            self.ask_to_stop(reason)

    def _say(self, level: str, text: str) -> None:
        if self._logged >= LOG_LIMIT:
            return
        self._logged += 1
        last = "" if self._logged < LOG_LIMIT else " (the log of this flow run is full; the journal in the run folder has the rest)"
        self.log.log(logging.WARNING if level == "warning" else logging.INFO, "%s%s", printable(text), last)
