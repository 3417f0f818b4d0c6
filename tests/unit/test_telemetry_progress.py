"""The progress display: plain lines off a terminal, one live line on it, cheap when nothing is due, never fatal."""

import io
import time

from mem_core.infrastructure.telemetry.progress import (
    PLAIN_EVERY_S,
    NoProgress,
    PreparingView,
    Progress,
    ProgressDisplay,
    ProgressView,
    describe,
)
from mem_core.runtime.data.values import PrepareProgress
from mem_core.runtime.session.opening.preparing_watch import PreparingWatch


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


FULL = ProgressView(
    step=500,
    total_steps=1_000,
    segment_index=1,
    loss=2.5,
    learning_rate=3e-4,
    tokens_per_s=12_345.0,
    memory_bytes=2**30,
    memory_limit_bytes=2**31,
    validated_step=400,
    restarts=2,
)


def at(step: int, segment_index: int = 0) -> ProgressView:
    return ProgressView(step=step, total_steps=1_000, segment_index=segment_index)


def test_everything_that_is_known_is_on_the_line() -> None:
    line = describe(FULL, eta_s=90.0)
    for part in (
        "500/1,000",
        "50.0%",
        "1 min 30 s",
        "2.5000",
        "3.00e-04",
        "12,345 tok/s",
        "mem 1.0/2.0 GiB",
        "validated 400",
        "restarts 2",
    ):
        assert part in line


def test_memory_of_another_size_than_its_limit_keeps_its_own_unit() -> None:
    view = ProgressView(step=1, total_steps=2, memory_bytes=2**20, memory_limit_bytes=2**31)
    assert describe(view).endswith("mem 1.0 MiB/2.0 GiB")


def test_what_is_not_known_is_left_out() -> None:
    assert describe(ProgressView(step=0, total_steps=0, phase="loading the model")) == "loading the model"


def test_off_a_terminal_a_line_comes_for_each_segment_and_each_half_minute() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressDisplay(stream, clock=clock) as display:
        for step in range(1, 1_001):
            clock.now_s += 0.1
            display.update(at(step, segment_index=step // 400))
    shown = [int(line.split("/")[0].removeprefix("step ").replace(",", "")) for line in stream.getvalue().splitlines()]
    assert shown == [1, 301, 400, 700, 800, 1_000]


def test_many_small_segments_do_not_flood_a_log() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressDisplay(stream, clock=clock) as display:
        for step in range(1_000):
            clock.now_s += 0.1
            display.update(at(step, segment_index=step))
    assert len(stream.getvalue().splitlines()) <= 52


def test_the_time_left_follows_the_rate_and_a_step_back_starts_it_anew() -> None:
    stream, clock = io.StringIO(), Clock()
    display = ProgressDisplay(stream, clock=clock)
    for step in (0, 100, 200):
        display.update(at(step))
        clock.now_s += 100
    assert "eta 13 min 20 s" in stream.getvalue().splitlines()[-1]
    display.update(at(150))
    assert "eta" not in stream.getvalue().splitlines()[-1]


def test_the_last_view_is_shown_at_the_end_and_nothing_after_it() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream, clock=Clock())
    display.update(at(1))
    display.update(at(2))
    display.close()
    display.update(at(3))
    display.note("too late")
    display.close()
    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == ["step 1", "step 2"]


def test_on_a_terminal_one_line_is_redrawn_and_notes_stand_above_it() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressDisplay(stream, live=True, clock=clock, width=200) as display:
        for step in range(1, 101):
            clock.now_s += 0.05
            display.update(at(step))
        display.note("worker lost: [rank 1]")
        clock.now_s += 1
        display.update(FULL)
    text = stream.getvalue()
    assert "worker lost: [rank 1]" in text
    assert "validated 400" in text
    assert text.count("step ") < 40
    assert all(len(line) < 400 for line in text.splitlines())


def test_data_preparation_has_its_own_line() -> None:
    view = PreparingView(done_bytes=2**20, total_bytes=2**22, num_rows=12, num_tokens=3_400, source="a.jsonl")
    assert describe(view) == "preparing data 25%  1.0 MiB of 4.0 MiB  12 rows  3,400 tokens  a.jsonl"
    assert describe(PreparingView(done_bytes=5, total_bytes=0)) == "preparing data  5 B"
    view = PreparingView(2**20, 2**22, num_tokens=3_400, phase="encoding and packing", left_s=130.0)
    assert describe(view) == "preparing data: encoding and packing 25%  about 2 min left  1.0 MiB of 4.0 MiB  3,400 tokens"


def test_a_preparation_names_its_phases_and_the_time_left_in_few_lines() -> None:
    """An hour of words, five a second, into a log: a line for each phase and one every half minute; the rate is that of the phase."""
    stream, clock = io.StringIO(), Clock()
    with ProgressDisplay(stream, live=False, clock=clock) as display:
        watch = PreparingWatch(display, clock)
        for phase, per_s in (("hashing", 100_000_000), ("tokenizing", 2_000_000), ("writing", 50_000_000)):
            total = per_s * 1_200
            for number in range(6_000):
                clock.now_s += 0.2
                done = PrepareProgress(phase=phase, bytes_done=total * number // 6_000, bytes_total=total)  # type: ignore[arg-type]
                watch(done)
        watch(PrepareProgress(phase="writing", note="it goes on"))
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 3_600 / PLAIN_EVERY_S + 5
    assert [sum(phase in line for line in lines) > 30 for phase in ("hashing", "encoding", "writing")] == [True] * 3
    assert "it goes on" in lines
    halfway = next(line for line in lines if "encoding and packing 50%" in line)
    assert "about 10 min left" in halfway
    assert "left" not in next(line for line in lines if "encoding" in line), "of a phase that has only begun nothing is known"


def test_a_stream_that_went_away_ends_the_display_and_not_the_run() -> None:
    for live in (False, True):
        stream = io.StringIO()
        display = ProgressDisplay(stream, live=live, clock=Clock())
        stream.close()
        display.update(at(1))
        display.note("x")
        display.close()
        assert stream.closed


def test_an_update_with_nothing_due_costs_microseconds() -> None:
    """The bound is 50 microseconds; the best of several rounds keeps a busy machine out of the figure."""
    for live in (False, True):
        display = ProgressDisplay(io.StringIO(), live=live, clock=Clock(), width=120)
        display.update(FULL)
        best_s = min(_time_of_updates(display) for _ in range(10))
        display.close()
        assert best_s / 1_000 < 50e-6


def _time_of_updates(display: ProgressDisplay) -> float:
    began_s = time.perf_counter()
    for _ in range(1_000):
        display.update(FULL)
    return time.perf_counter() - began_s


def test_showing_nothing_is_also_a_progress() -> None:
    ports: tuple[Progress, ...] = (NoProgress(), ProgressDisplay(io.StringIO()))
    for port in ports:
        port.update(FULL)
        port.note("x")
        port.close()
    assert isinstance(ports[0], NoProgress)


def test_between_segments_the_last_numbers_stay_on_the_line_and_a_step_back_drops_them() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressDisplay(stream, clock=clock) as display:
        display.update(FULL)
        clock.now_s += 60
        display.update(at(501, segment_index=2))
        clock.now_s += 60
        display.update(at(400, segment_index=2))
    first, second, third = stream.getvalue().splitlines()
    assert "loss 2.5000" in first
    assert "loss 2.5000" in second
    assert "loss" not in third
