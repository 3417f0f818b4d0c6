"""The curves and the words of a run's pages in Prefect: round marks, both colour schemes, means over noise, texts that cannot break out."""

import itertools
import re
from dataclasses import dataclass

import pytest

from flows.prefect_view.board import RunBoard
from flows.prefect_view.curves import BLUE, GREEN, ORANGE, TEXT, Curve, Line, lines_svg, mark_words, round_marks
from flows.prefect_view.markdown import bullets, code, inline, table
from flows.prefect_view.page import Places, render_page, status_line
from flows.prefect_view.summary import render_summary, result_in
from mem_core.domain.environment import EnvironmentReport, Finding
from mem_core.domain.events import DoctorReported, Evaluated, FaultMet
from mem_core.domain.results.evaluation import SetFigures
from mem_core.domain.results.samples import Sample, StepSamples
from mem_core.domain.run import DataSummary, Goodput, RunResult
from mem_core.infrastructure.telemetry.progress import ProgressView
from mem_core.testing.synthetic_run import JournalBuilder

PREFECT_PAGES = ("#eaeaea", "#26272b")  # the background of its pages, light and dark


@pytest.mark.parametrize(
    ("low", "high", "most", "words"),
    [
        (1.48, 5.72, 5, ["2", "3", "4", "5"]),
        (2.44, 2.58, 5, ["2.45", "2.50", "2.55"]),
        (0.0, 435.0, 5, ["0", "100", "200", "300", "400"]),
        (1, 1_500, 6, ["500", "1,000", "1,500"]),
        (0, 1_000_000, 6, ["0", "200,000", "400,000", "600,000", "800,000", "1,000,000"]),
        (1e-5, 9e-5, 5, ["0.00002", "0.00004", "0.00006", "0.00008"]),
        (-0.5, 0.7, 5, ["-0.5", "0.0", "0.5"]),
    ],
)
def test_marks_of_an_axis_are_round(low: float, high: float, most: int, words: list[str]) -> None:
    assert mark_words(round_marks(low, high, most)) == words


def test_marks_are_few_and_one_two_or_five_times_a_power_of_ten_apart() -> None:
    for number in range(1, 400):
        marks = round_marks(number * 0.137, number * 0.137 + number**2.3 * 1e-4, 5)
        assert 1 <= len(marks) <= 6
        apart = {f"{after - before:.0e}"[0] for before, after in itertools.pairwise(marks)}
        assert apart <= {"1", "2", "5"}, number


def luminance(colour: str) -> float:
    """Relative luminance of sRGB, as WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", [TEXT, BLUE, ORANGE, GREEN])
@pytest.mark.parametrize("page", PREFECT_PAGES)
def test_pictures_are_seen_on_light_and_dark_pages(colour: str, page: str) -> None:
    """Prefect does not tell a picture which it stands on: 3 to 1 for graphics, and nothing painted behind."""
    lighter, darker = sorted((luminance(colour), luminance(page)), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 3.0
    svg = lines_svg([Line("loss", [(1, 2.0), (5, 1.0)], colour)])
    assert "<rect" not in svg
    assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {colour, TEXT}


def noisy(num_points: int) -> RunBoard:
    """Losses that alternate between 1 and 5."""
    board = RunBoard("r", 1_000)
    for step in range(1, num_points + 1):
        board.add_view(ProgressView(step=step, total_steps=1_000, loss=5.0 if step % 2 else 1.0), 1e9 + step)
    return board


def test_the_loss_is_smoothed_over_the_raw_one_with_the_held_out_points_in_the_same_picture() -> None:
    board = noisy(100)
    means = [value for _, value in board.loss.smoothed()[5:-5]]
    assert len(means) == 90
    assert all(2.2 < value < 3.8 for value in means)
    board.add_line(JournalBuilder().start().add(Evaluated(step=50, validation_loss=3.25)).lines[1])
    page = render_page(board, Places("/runs/r"))
    assert re.search(r"\| loss \| [23]\.\d\d smoothed \(1\.0000 last\) \|", page)
    assert "| validation loss | 3.2500 at step 50 |" in page
    assert page.count("](data:image/svg+xml") == 1
    assert not RunBoard("r", 10).loss.smoothed()


def test_validation_points_are_drawn_as_points_however_few() -> None:
    svg = lines_svg([Line("training loss", [(1, 2.0), (100, 1.0)], BLUE), Line("held-out rows", [(50, 1.5)], ORANGE, dots=True)])
    assert f'r="3" fill="{ORANGE}"' in svg
    assert "● held-out rows" in svg


def test_time_left_and_elapsed_are_said_and_time_between_attempts_is_no_part_of_them() -> None:
    builder = JournalBuilder(start_unix_s=1e9)
    builder.start().segment(0, 0, 100).end("interrupted", 75)
    builder.start(resumed_step=100, after_s=5_000)
    board = RunBoard("r", 1_000)
    for line in builder.lines:
        board.add_line(line)
    assert board.left_s is None
    board.add_view(ProgressView(step=100, total_steps=1_000, loss=2.0), builder.now_s + 20)
    board.add_view(ProgressView(step=150, total_steps=1_000, loss=2.0), builder.now_s + 30)
    assert (board.elapsed_s, board.left_s) == (10 + 30, 850 / 5)
    page = render_page(board, Places("/runs/r"))
    assert "| elapsed | 40.0 s in 2 attempts |" in page
    assert "| time left | 2 min 50 s at 5 steps/s |" in page
    assert status_line(board).startswith("step 150 of 1,000 (15.0 %) · 2 min 50 s left · loss 2.0000")
    board.add_line(builder.segment(1, 100, 1_000).end().lines[-1])
    assert board.left_s is None, "a run that ended has no time left"


def test_what_the_doctor_wants_done_stands_in_full_and_wraps() -> None:
    """Prefect never breaks a line of a table: the remedy was cut off."""
    remedy = "Give a larger data.validation, or a list of files of its own, or leave it out; " * 4
    report = EnvironmentReport.model_validate(
        {
            "device": "cpu", "device_reason": "no CUDA device", "dtype": "float32", "num_cores": 2, "threads_per_rank": 1,
            "versions": {}, "memory": (),
            "findings": (
                Finding(check="data.validation", severity="notice", observed="no row was held out", remedy=remedy.strip()),
                Finding(check="disk", severity="ok", observed="41 GiB"),
            ),
        }
    )  # fmt: skip
    board = RunBoard("r", 10)
    board.add_line(JournalBuilder().start().add(DoctorReported(report=report)).lines[1])
    lines = render_page(board, Places("/runs/r")).splitlines()
    assert f"- **notice** `data.validation`: no row was held out. {remedy.strip()}" in lines
    assert "- `disk` 41 GiB" in lines
    assert "1 check fine:" in lines


@dataclass(frozen=True)
class Hostile:
    text: str
    harmless: str


@pytest.mark.parametrize(
    "case",
    [
        Hostile("![x](http://evil/p.png)", "!\\[x\\](http://evil/p.png)"),
        Hostile("a | b\n# c", "a \\| b # c"),
        Hostile("</details><img src=x>", "&lt;/details>&lt;img src=x>"),
        Hostile("**b** `c` ~~d~~", "\\*\\*b\\*\\* \\`c\\` \\~\\~d\\~\\~"),
    ],
)
def test_what_others_wrote_stays_text(case: Hostile) -> None:
    assert inline(case.text) == case.harmless
    assert table(("a",), [(case.text,)]).splitlines()[2] == f"| {case.harmless} |"
    board = RunBoard("r", 10)
    board.add_line(JournalBuilder().start().add(FaultMet(kind="k", step=1, detail=case.text)).lines[1])
    assert case.harmless in render_page(board, Places("/runs/r"))
    assert "\n" not in code(case.text)
    assert "`" not in code(case.text)[1:-1]
    assert bullets(["a", "b"]) == "- a\n- b"


def ended(message: str = "") -> RunResult:
    return RunResult(
        status="completed", run_id="r", message=message, applied_steps=1_000, epochs=2.5, loss_first=5.0, loss_last=1.0,
        validation_loss=2.123456789012345, validation_rows=95, validation_rows_total=95,
        evaluation={"validation": SetFigures.of(2.123456789012345, 0.251234567, 9_000, 95, 95)},
        data=DataSummary(num_documents=16, num_tokens=78_848, dropped_rows={"blank_lines": 2}, num_bad_rows=3), tokens=1_024_000,
        tokens_per_s=9_876.54321, goodput=Goodput(fraction=0.8123456789, seconds={}),
        trajectory_digest="a" * 64, weights_digest="b" * 64, report_url="http://127.0.0.1:4200/mem/runs/0/r/report.html",
    )  # fmt: skip


def shown(page: str) -> str:
    """What a reader sees: comments are not shown."""
    return re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)


def test_a_finished_run_is_told_in_words_figures_and_curves_and_not_as_json() -> None:
    places = Places("/runs/r", "file:///runs/r/report.html", "/mem/runs/0/r/report.html", "/mem/")
    page = render_summary(ended(), noisy(100), places)
    text = shown(page)
    for words in (
        "# Run r: completed",
        "Completed 1,000 steps.",
        "| validation loss | 2.1235 over 95 rows |",
        "| perplexity | 8.36, 25.1% of tokens right |",
        "| data | 16 documents, 78,848 tokens |",
        "| rows left out | 2 dropped or cut, 3 bad |",
        "2.5 epochs",
        "1,024,000 at 9,877 a second",
        "[report with every curve and table](/mem/runs/0/r/report.html)",
        "[all runs](/mem/)",
        "](data:image/svg+xml;base64,",
    ):
        assert words in text
    assert re.search(r"\| training loss \| [23]\.\d\d → [23]\.\d\d, smoothed \|", text)
    assert text.index("validation loss") < text.index("training loss")
    assert "{" not in text
    assert not re.search(r"\d\.\d{6,}", text)


def test_a_program_finds_the_whole_result_in_the_page_and_no_text_ends_its_comment() -> None:
    hostile = Sample(prompt="a", greedy='b\n```json\n{"run_id": "other"}\n```\n-->', sampled="<!-- c\n```json\n{")
    samples = StepSamples(step=5, samples=(hostile,))
    result = ended("odd --> text ``` with\nlines").model_copy(update={"samples": samples})
    page = render_summary(result, RunBoard("r", 1_000), Places("/runs/r"))
    assert RunResult.model_validate(result_in(page)) == result
    assert page.count("-->") == 3, "one in the sentence and one in an answer, as text, and the end of the comment"
    assert page.rstrip().endswith("-->")


def test_a_curve_keeps_the_newest_point_in_its_means() -> None:
    curve = Curve()
    for step in range(500):
        curve.add(step, 2.0)
    assert curve.smoothed()[-1] == (499, 2.0)
