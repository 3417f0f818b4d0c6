"""The whole report page from a synthetic run folder: complete, closed to the outside, escaped, tolerant, small and quick."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mem_core.core.run.run_report import load_report_data, write_report
from mem_core.domain.events import DataPrepared, DoctorReported, Evaluated, Noted
from mem_core.domain.run import DataSummary
from mem_core.infrastructure.telemetry.metrics import METRIC_DTYPES, read_metrics, write_segment_metrics
from mem_core.infrastructure.telemetry.report_page.curves import all_charts
from mem_core.testing.synthetic_history import HOSTILE_TEXT, SyntheticRun
from mem_core.testing.synthetic_run import JournalBuilder

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers tags, attributes and text."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    run_folder = tmp_path_factory.mktemp("run")
    SyntheticRun(num_steps=6_000, segment_steps=250, seed=3).write(run_folder)
    return Page(write_report(run_folder))


def test_every_part_is_there(page: Page) -> None:
    headings = (
        "Curves",
        "Where the time went",
        "Faults",
        "Checkpoints",
        "Policy",
        "Memory plan",
        "Environment",
        "Identity",
        "Request",
        "Notes",
    )
    for heading in headings:
        assert heading in page.text
    for words in (
        "Completed 6,000 of 6,000 steps",
        "run_killed",
        "lr_multiplier: asked 3, applied 0.85",
        "rm -rf /",
        "limit: cgroup",
        "5c1f",
    ):
        assert words in page.text
    assert page.tags.count("figure") == 7


def test_nothing_comes_from_outside_and_nothing_runs(page: Page) -> None:
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "iframe", "object", "embed", "link", "img"} & set(page.tags)


def test_what_came_from_outside_is_shown_as_text(page: Page) -> None:
    assert HOSTILE_TEXT in page.text


def test_an_undisturbed_run_says_so(tmp_path: Path) -> None:
    SyntheticRun(num_steps=600, segment_steps=200, fault_every_segments=0, with_kills=False).write(tmp_path)
    assert "No fault was met" in Page(write_report(tmp_path)).text


def test_a_run_that_goes_on_and_one_that_failed_say_so(tmp_path: Path) -> None:
    SyntheticRun(num_steps=600, segment_steps=200, end_status="running").write(tmp_path / "on")
    assert "steps so far; last sign of life 2023-11-14" in Page(write_report(tmp_path / "on")).text
    SyntheticRun(num_steps=600, segment_steps=200, end_status="failed").write(tmp_path / "failed")
    assert "Failed after 600 of 600 steps with exit code 79" in Page(write_report(tmp_path / "failed")).text


def test_an_empty_folder_still_gives_a_page(tmp_path: Path) -> None:
    text = Page(write_report(tmp_path)).text
    assert text.count("No values were recorded.") == 7
    assert "run.json" in text


def test_damage_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    SyntheticRun(num_steps=1_000, segment_steps=250).write(tmp_path)
    (tmp_path / "metrics" / "step-000000500.npz").write_bytes(b"cut")
    (tmp_path / "run.json").write_text("{not JSON")
    journal = tmp_path / "journal" / "attempt-0001.jsonl"
    journal.write_text(journal.read_text().replace('"event":"noted"', '"event":"from_a_later_version"', 1))
    text = Page(write_report(tmp_path)).text
    for words in ("step-000000500.npz left out", "run.json: it is no JSON", "attempt-0001.jsonl:4", "Completed 1,000 steps"):
        assert words in text


def test_losses_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    JournalBuilder().start().segment(0, 0, 100).end().write(tmp_path / "journal")
    SyntheticRun(num_steps=100, segment_steps=100).write(tmp_path / "other")
    columns = read_metrics(tmp_path / "other" / "metrics")
    columns["loss"][[10, 20]] = np.nan
    write_segment_metrics(tmp_path / "metrics", 100, columns)
    assert "the loss is not a finite number: 2 steps (11, 21)." in Page(write_report(tmp_path)).text


def test_nothing_but_the_page_is_left_behind(tmp_path: Path) -> None:
    SyntheticRun(num_steps=400, segment_steps=200).write(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    write_report(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} - before == {"report.html"}


def test_a_million_steps_stay_small_and_quick(tmp_path: Path) -> None:
    """Under 3 MB, and no slower per step than a tenth of it by more than a small factor; a spike of one step in a million is drawn."""
    durations_s: list[float] = []
    for num_steps in (100_000, 1_000_000):
        run_folder = tmp_path / str(num_steps)
        SyntheticRun(num_steps=num_steps, segment_steps=1_000, fault_every_segments=10).write(run_folder)
        began_s = time.process_time()
        path = write_report(run_folder)
        durations_s.append(time.process_time() - began_s)
        assert path.stat().st_size < 3_000_000
    assert durations_s[1] < 15 * durations_s[0]
    data = load_report_data(run_folder)
    data.columns["loss"][654_321] = 77.5
    raw = all_charts(data)[0].series[0]
    assert (raw.look, int(raw.x[raw.y.argmax()]), float(raw.y.max())) == ("faint", int(data.steps[654_321]), 77.5)
    assert raw.x.size <= 2_000


def test_the_headline_is_validation_first_and_no_single_batch(tmp_path: Path) -> None:
    """Losses of 5, 1, 5, 1 ...: whichever batch comes last, the loss is 3."""
    run_folder = tmp_path / "run"
    builder = JournalBuilder().start().segment(0, 0, 3_000)
    builder.add(Evaluated(step=3_000, validation_loss=2.25, validation_rows=90, validation_rows_total=90)).end()
    builder.write(run_folder / "journal")
    steps = np.arange(1, 3_001)
    columns = {name: np.ones(steps.size) for name in METRIC_DTYPES}
    columns |= {"batch_index": steps - 1, "step": steps, "loss": np.where(steps % 2, 5.0, 1.0)}
    write_segment_metrics(run_folder / "metrics", 3_000, columns)
    text = Page(write_report(run_folder)).text
    assert "Validation loss 2.2500, training loss 3.000 → 3.000 (means of 20 steps)" in text
    assert text.index("Validation loss 2.2500") < text.index("Training loss 3.0000") < text.index("Steps applied 3,000")
    assert "perplexity 9.488, over 90 rows" in text


def test_a_single_validation_is_a_line_across_the_loss_and_not_a_dot(tmp_path: Path) -> None:
    SyntheticRun(num_steps=600, segment_steps=200).write(tmp_path)
    data = load_report_data(tmp_path)
    lines = [series for series in all_charts(data)[0].series if series.label.startswith("validation")]
    assert [(line.label, line.look, line.x.tolist()) for line in lines] == [("validation at step 600", "level", [1, 600])]
    data.timeline.evaluations.append(Evaluated(step=200, validation_loss=3.0))
    line = next(series for series in all_charts(data)[0].series if series.label == "validation")
    assert (line.look, line.x.tolist(), line.y[0]) == ("points", [200, 600], 3.0)


def test_versions_notes_and_moments_are_said_once_and_for_people(tmp_path: Path) -> None:
    SyntheticRun(num_steps=600, segment_steps=200).write(tmp_path)
    facts = json.loads((tmp_path / "run.json").read_text()) | {"born_unix_s": 1796039745.5, "length": {"epochs": None}}
    (tmp_path / "run.json").write_text(json.dumps(facts | {"versions": {"torch": "2.12.0", "numpy": "2.4.6", "deepspeed": "0.19.8"}}))
    builder = JournalBuilder()
    builder.start().add(Noted(text="the mirror is away"), Noted(text="the mirror is away"), after_s=60)
    builder.add(DoctorReported(report=load_report_data(tmp_path).timeline.environment or pytest.fail("no report")))
    (tmp_path / "journal" / "attempt-0001.jsonl").unlink()
    builder.write(tmp_path / "journal")
    text = Page(write_report(tmp_path)).text
    assert "born 2026-11-30 11:55:45 UTC" in text
    assert not re.search(r"unix_s|1796039745|length / epochs", text)
    assert "version of torch 2.13.0 (born with 2.12.0)" in text
    assert [text.count(f"version of {name} ") for name in ("torch", "numpy", "deepspeed")] == [1, 1, 1]
    assert "0.19.8 (born" not in text
    assert "2023-11-14 22:14:20 UTC the mirror is away 2" in text


def test_time_between_attempts_stands_apart_and_every_attempt_is_listed(tmp_path: Path) -> None:
    builder = JournalBuilder().start().segment(0, 0, 100).end("interrupted", 75)
    builder.start(resumed_step=100, after_s=3_600).segment(1, 100, 200).end()
    builder.write(tmp_path / "run" / "journal")
    text = Page(write_report(tmp_path / "run")).text
    assert "Apart from these: 1 h 00 min between attempts, in which nobody had asked the run to go on." in text
    assert "between_attempts" not in text, "it is no bucket among the others"
    assert "1 2023-11-14 22:13:20 UTC 10.0 s – – interrupted 2 2023-11-14 23:13:30 UTC 10.0 s 1 h 00 min 100 completed" in text


def test_what_the_data_was_with_every_count(tmp_path: Path) -> None:
    summary = DataSummary(
        num_files=3, num_documents=1_200, num_sequences=900, num_tokens=345_678, trained_tokens=300_000, steps_per_epoch=112.5,
        num_validation_sequences=55, num_bad_rows=12, bad_rows=("a.jsonl:7: no column text",), dropped_rows={"truncated_documents": 31},
        document_tokens={"p50": 210, "p99": 1_830, "longest": 2_345}, num_copies=17, notes=("the beginning of a prompt gave way",),
    )  # fmt: skip
    noted = (Noted(text="the beginning of a prompt gave way"), Noted(text="another note"))
    JournalBuilder().start().add(*noted, DataPrepared(data=summary)).segment(0, 0, 225).end().write(tmp_path / "journal")
    text = Page(write_report(tmp_path)).text
    for words in (
        "225 steps (2 epochs)",
        "Documents 1,200 345,678 tokens; 31 dropped or cut, 12 bad",
        "documents cut at data.sequence_length 31",
        "bad rows 12 skipped",
        "Bad rows that were skipped (of 12)",
        "a.jsonl:7: no column text",
        "sequences held out 55",
        "112.5 steps see every row once",
        "another note",
        "documents 1,200 17 of them copies of others",
        "tokens of a document, at 50 of 100 210 before it is cut",
        "tokens of a document, the longest 2,345",
    ):
        assert words in text
    assert text.count("the beginning of a prompt gave way") == 1


def test_the_page_can_be_read_without_seeing_it_and_walked_by_keyboard(page: Page, tmp_path: Path) -> None:
    SyntheticRun(num_steps=600, segment_steps=200).write(tmp_path)
    html = write_report(tmp_path).read_text()
    assert html.count('role="img" aria-label="') == 8, "seven charts and the bar"
    assert set(re.findall(r'aria-labelledby="([^"]+)"', html)) <= set(re.findall(r'<h2 id="([^"]+)"', html))
    assert {link for link in page.links if not link.startswith("#m") and not link.startswith("#p")} >= {"#curves", "#where-the-time-went"}
    for link in re.findall(r'<a href="#([^"]+)"', html):
        assert f'<h2 id="{link}"' in html
    assert "@media print" in html
    assert "@media screen and (prefers-color-scheme: dark)" in html, "paper is white"
