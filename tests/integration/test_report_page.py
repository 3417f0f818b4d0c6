"""The whole report page from a synthetic run folder: complete, closed to the outside, escaped, tolerant, small and quick."""

import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mem_core.core.run.run_report import write_report
from mem_core.infrastructure.telemetry.metrics import read_metrics, write_segment_metrics
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


@pytest.mark.slow
def test_a_million_steps_stay_small_and_quick(tmp_path: Path) -> None:
    """Under 2 MB, and no slower per step than a tenth of it by more than a small factor."""
    durations_s: list[float] = []
    for num_steps in (100_000, 1_000_000):
        run_folder = tmp_path / str(num_steps)
        SyntheticRun(num_steps=num_steps, segment_steps=1_000, fault_every_segments=10).write(run_folder)
        began_s = time.process_time()
        path = write_report(run_folder)
        durations_s.append(time.process_time() - began_s)
        assert path.stat().st_size < 2_000_000
    assert durations_s[1] < 15 * durations_s[0]
