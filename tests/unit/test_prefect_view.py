"""The page, the curves and the news of a run: pure, bounded, and never in the way of training."""

import logging
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from flows.prefect_view.board import NUM_CHECKPOINTS, NUM_FAULTS, RunBoard
from flows.prefect_view.curves import MAX_POINTS, Curve, curve_svg, data_url
from flows.prefect_view.markdown import table
from flows.prefect_view.news import MemEvent, event_of, log_line
from flows.prefect_view.page import Places, render_page, status_line
from flows.prefect_view.publisher import LOG_LIMIT, QUEUE_LIMIT, Pace, PrefectView
from mem_core.core.run.state_manager import StateManager
from mem_core.domain.checkpoint import CheckpointVerdict
from mem_core.domain.events import (
    CheckpointCommitted,
    CheckpointJudged,
    CheckpointRemoved,
    Event,
    FaultMet,
    JournalLine,
    Recovered,
    RunEnded,
    SegmentEnded,
)
from mem_core.domain.segment import Evidence, SegmentCompleted, WorkerLost
from mem_core.infrastructure.telemetry.metrics import METRIC_DTYPES, write_segment_metrics
from mem_core.infrastructure.telemetry.progress import NoProgress, ProgressView


def line(sequence: int, event: Event, attempt: int = 1) -> JournalLine:
    return JournalLine(sequence=sequence, time_unix_s=1e9 + sequence, attempt=attempt, previous_sha256="0" * 64, event=event)


def completed(to_step: int) -> SegmentEnded:
    outcome = SegmentCompleted(
        from_step=to_step - 10, to_step=to_step, batch_index=to_step, loss_first=3.0, loss_last=2.5, tokens=1_000, duration_s=2.0,
        peak_bytes=2**20, trajectory_digest="d",
    )  # fmt: skip
    return SegmentEnded(segment_index=to_step // 10 - 1, outcome=outcome)


def judged(step: int, valid: bool = True) -> CheckpointJudged:
    reasons = () if valid else ("a.pt: hash differs",)
    return CheckpointJudged(verdict=CheckpointVerdict(step=step, level="integrity", valid=valid, reasons=reasons, manifest_sha256="m"))


def test_a_curve_stays_small_over_a_million_steps_and_keeps_its_shape() -> None:
    curve = Curve()
    for step in range(1_000_000):
        curve.add(step, float(step))
    assert MAX_POINTS // 4 < len(curve.points) < MAX_POINTS
    assert curve.points[-1][0] > 990_000
    assert all(step == value for step, value in curve.points)
    assert len(data_url(curve_svg(curve, "Loss", "#000"))) < 16_000
    assert "step 999,999<" in curve_svg(curve, "Loss", "#000"), "the newest one is always drawn"


def test_a_curve_takes_back_what_was_lost_and_leaves_out_what_is_no_number() -> None:
    curve = Curve()
    for step, value in ((1, 5.0), (2, 4.0), (3, float("nan")), (4, None), (5, 3.0), (2, 4.5)):
        curve.add(step, value)
    assert curve.points == [(1, 5.0), (2, 4.5)]


def test_the_board_counts_everything_and_shows_the_newest() -> None:
    board = RunBoard("r", 1_000)
    for index in range(100):
        step = 10 * (index + 1)
        for offset, event in enumerate((completed(step), CheckpointCommitted(step=step, size_bytes=5, duration_s=0.1), judged(step))):
            board.add_line(line(5 * index + offset, event))
        board.add_line(line(5 * index + 3, FaultMet(kind="worker_lost", step=step, detail="x | y <b>")))
        board.add_line(line(5 * index + 4, Recovered(kind="worker_lost", step=step, recovered_s=1.5)))
    assert (board.num_segments, board.num_validated, board.num_faults) == (100, 100, 100)
    assert (len(board.checkpoints), len(board.faults)) == (NUM_CHECKPOINTS, NUM_FAULTS)
    assert board.percent == 100.0
    page = render_page(board, Places("/runs/r"))
    assert f"newest {NUM_FAULTS} of 100" in page
    assert "after 1.5 s" in page
    assert "x \\| y &lt;b>" in page
    assert len(page) < 40_000


def test_the_line_of_a_run_in_training_says_the_most_wanted_first_and_keeps_what_it_knew() -> None:
    """An evaluation knows no loss: the newest known one stays, and what is being done is said."""
    board = RunBoard("r", 1_000)
    board.add_line(line(0, judged(100)))
    board.add_view(ProgressView(step=150, total_steps=1_000, loss=2.5, tokens_per_s=6_311.4, phase="step"), 2e9)
    assert status_line(board) == "step 150 of 1,000 (15.0 %) · loss 2.5000 · 6,311 tokens/s · step 100 proven"
    board.add_view(ProgressView(step=160, total_steps=1_000, phase="evaluate"), 2e9 + 10)
    assert (
        status_line(board)
        == "step 160 of 1,000 (16.0 %) · 14 min 00 s left · loss 2.5000 · 6,311 tokens/s · step 100 proven · now: evaluate"
    )
    assert "| tokens a second | 6,311 |" in render_page(board, Places("/runs/r"))


def test_fresh_workers_take_nothing_off_the_page() -> None:
    """They say step 0 until they have restored; what they know nothing of is neither drawn nor counted down."""
    board = RunBoard("r", 1_000)
    board.add_view(ProgressView(step=150, total_steps=1_000, loss=2.5, memory_bytes=2**20, phase="step"))
    board.add_view(ProgressView(step=0, total_steps=1_000, memory_bytes=2**20, phase="restore"))
    assert (board.step, board.loss.points, board.memory.points) == (150, [(150, 2.5)], [(150, 1.0)])


def test_an_amount_is_drawn_from_zero() -> None:
    """24 MiB more of 350 is a small slope; the axis begins at 0."""
    curve = Curve()
    for step, value in ((1, 339.0), (2, 363.0)):
        curve.add(step, value)
    assert ">0<" in curve_svg(curve, "Memory", "#000", from_zero=True)
    assert ">0<" not in curve_svg(curve, "Memory", "#000")


def test_a_checkpoint_says_when_it_is_gone_and_small_times_in_milliseconds() -> None:
    board = RunBoard("r", 100)
    board.add_line(line(0, CheckpointCommitted(step=10, size_bytes=5, duration_s=0.042)))
    board.add_line(line(1, CheckpointRemoved(step=10, reason="rotation")))
    assert "| 42 ms |  | no (rotation) |" in render_page(board, Places("/runs/r"))


def test_a_line_read_twice_is_folded_once() -> None:
    """The history is read while new lines already arrive."""
    board = RunBoard("r", 100)
    assert board.add_line(line(0, judged(10)))
    assert not board.add_line(line(0, judged(10)))
    assert board.num_validated == 1


def test_a_new_attempt_takes_the_old_ending_off_the_page() -> None:
    board = RunBoard("r", 100)
    board.add_line(line(0, RunEnded(status="interrupted", exit_code=75, message="stopped")))
    assert status_line(board).startswith("interrupted at step")
    board.add_line(line(1, completed(10), attempt=2))
    assert "interrupted" not in status_line(board)


def test_a_cell_cannot_break_out_of_its_table() -> None:
    assert table(("a",), [("x\n| y",)]).splitlines()[2] == "| x \\| y |"


def test_what_is_worth_an_event_and_a_log_line() -> None:
    lost = WorkerLost(cause="SIGKILL", evidence=Evidence(rank=0, last_lines=("one", "two")))
    assert event_of(line(0, judged(10))) == MemEvent("mem.checkpoint.validated", {"step": 10, "level": "integrity", "reasons": []})
    rejected = event_of(line(0, judged(10, valid=False)))
    assert rejected is not None
    assert rejected.name == "mem.checkpoint.rejected"
    assert event_of(line(0, completed(10))) is None
    assert log_line(line(0, completed(20))) == (
        "info",
        "segment 1: steps 10 to 20 in 2.0 s, loss 3.0000 to 2.5000, 500 tokens/s, peak 1.0 MiB",
    )
    failed = log_line(line(0, SegmentEnded(segment_index=0, outcome=lost)))
    assert failed is not None
    assert failed[0] == "warning"
    assert failed[1].endswith("last lines of the worker:\n  one\n  two")
    assert log_line(line(0, judged(10))) is None


class Api:
    """A server that records, or that fails for ever or for a while."""

    def __init__(self, error: Exception | None = None, stop: str = "", refuse_first: int = 0) -> None:
        self.error, self.stop, self.refusals_left = error, stop, refuse_first
        self.calls: list[tuple[str, Any]] = []
        self.page = ""

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.calls.append(("exit", None))

    def _call(self, name: str, value: Any) -> None:
        if self.error is not None:
            raise self.error
        if self.refusals_left:
            self.refusals_left -= 1
            raise ConnectionError("503")
        self.calls.append((name, value))

    def put_artifact(self, key: str, kind: str, data: Any, description: str) -> None:
        self._call(key, data)

    def emit(self, event: MemEvent) -> None:
        self._call("emit", event.name)

    def introduce(self) -> None:
        self._call("introduce", None)

    def stop_wanted(self) -> str:
        self._call("poll", None)
        return self.stop

    def served_page(self, run_folder: Path) -> str:
        self._call("served", run_folder)
        return self.page


def view_of(api: Api, asked: list[str] | None = None, pace: Pace | None = None) -> PrefectView:
    asked = [] if asked is None else asked
    return PrefectView(NoProgress(), api, RunBoard("r", 100), logging.getLogger("test"), asked.append, pace or Pace())


def test_a_dead_server_costs_the_run_nothing() -> None:
    """Every call of the run returns at once, and close waits for a bounded time, though each API call fails."""
    view = view_of(Api(error=ConnectionError("away")), pace=Pace(0.0, 0.0)).start()
    started_s = time.monotonic()
    for step in range(10_000):
        view.update(ProgressView(step=step, total_steps=10_000))
    assert time.monotonic() - started_s < 1.0
    time.sleep(1.2)
    view.close()
    assert view.failed_calls > 3
    assert time.monotonic() - started_s < 5.0


def test_a_full_queue_drops_and_never_blocks() -> None:
    view = view_of(Api())
    for sequence in range(QUEUE_LIMIT + 7):
        view._hear(line(sequence, judged(10)))
    assert view.dropped == 7


def test_a_cancel_seen_by_polling_is_asked_for_once() -> None:
    asked: list[str] = []
    view = view_of(Api(stop="a cancel in Prefect"), asked, Pace(60.0, 0.1)).start()
    time.sleep(2.0)
    view.close()
    assert asked == ["a cancel in Prefect"]


def test_updates_are_paced_and_the_end_is_published() -> None:
    api = Api()
    view = view_of(api, pace=Pace(publish_s=60.0, poll_s=60.0)).start()
    for step in range(0, 100, 10):
        view.update(ProgressView(step=step, total_steps=100, loss=1.0))
        time.sleep(0.1)
    view._hear(line(0, RunEnded(status="completed", exit_code=0)))
    view.close()
    pages = [data for name, data in api.calls if name == "mem-r"]
    assert len(pages) == 2, "one at the start, one at the end"
    assert "completed at step" in pages[-1]
    assert not [thread for thread in threading.enumerate() if thread.name == "prefect-view"]


def test_an_end_that_is_refused_once_is_published_by_the_next_try() -> None:
    api = Api(refuse_first=2)
    view = view_of(api).start()
    view._hear(line(0, RunEnded(status="completed", exit_code=0)))
    view.close()
    assert view.failed_calls > 0
    assert [data for name, data in api.calls if name == "mem-r"][-1].count("completed at step") == 1
    assert ("introduce", None) in api.calls


def test_an_old_view_never_takes_back_the_end_of_its_segment() -> None:
    api = Api()
    view = view_of(api, pace=Pace(publish_s=60.0, poll_s=60.0)).start()
    view.update(ProgressView(step=98, total_steps=100))
    view._hear(line(0, completed(100)))
    time.sleep(1.2)
    view.close()
    assert [data for name, data in api.calls if name == "mem-r-progress"][-1] == 100.0


def test_a_run_of_a_month_renews_its_page_some_thousand_times() -> None:
    age_s, renewals = 0.0, 0
    while age_s < 30 * 86_400:
        age_s += Pace().due_s(age_s)
        renewals += 1
    assert renewals < 8_000
    assert Pace().due_s(3 * 3_600) < 11


def test_the_flow_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    view = view_of(Api())
    with caplog.at_level(logging.INFO, logger="test"):
        for index in range(LOG_LIMIT + 50):
            view.note(f"note {index}")
    assert len(caplog.records) == LOG_LIMIT
    assert "is full" in caplog.records[-1].getMessage()


def test_a_retry_shows_the_curves_of_earlier_attempts(tmp_path: Path) -> None:
    """From the run's own metrics: the journal has a point per segment only."""
    steps = np.arange(1, 601)
    zeros = {name: np.zeros(len(steps)) for name in METRIC_DTYPES}
    StateManager.acquire(tmp_path, "r").release()
    write_segment_metrics(tmp_path / "r" / "metrics", 600, {**zeros, "batch_index": steps - 1, "step": steps, "loss": 3.0 - steps / 1_000})
    state = StateManager.acquire(tmp_path, "r")
    view = PrefectView(NoProgress(), Api(), RunBoard("r", 1_000), logging.getLogger("test-view"), lambda reason: None)
    view.follow(state)
    state.emit(completed(610))
    view.start().close()
    state.release()
    assert len(view.board.loss.points) > 100
    assert view.board.loss.points[0] == (1, pytest.approx(2.999))
    assert view.board.loss.points[-1] == (610, 2.5), "what is new comes after it"
