"""Charts: inline SVG that fits any page, spikes seen, hostile or missing values survived."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from mem_core.infrastructure.telemetry.charts import Chart, Series, describe, draw


def chart_of(values: list[float], **changes: object) -> Chart:
    y = np.array(values)
    series = (Series("each step", np.arange(y.size), y, "faint"), Series("mean", np.arange(y.size), y))
    return Chart(**{"title": "Loss", "alt": "Loss falls", "y_label": "nats", "series": series, **changes})  # pyright: ignore


def svg_of(html: str) -> ElementTree.Element:
    found = re.search(r"<svg.*</svg>", html, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found.group(0))


def test_a_chart_is_whole_scalable_and_follows_the_page_s_colours() -> None:
    html = draw(chart_of([3.0, 2.0, 1.5]))
    svg = svg_of(html)
    assert set(svg.attrib) >= {"viewBox"}
    assert "width" not in svg.attrib
    assert "var(--accent)" in html
    assert "#010206" not in html
    assert 'aria-label="Loss falls"' in html
    assert "font-family" not in html


def test_ids_that_are_referred_to_exist_and_differ_between_charts() -> None:
    one, other = draw(chart_of([1.0, 2.0])), draw(chart_of([1.0, 2.0], title="Speed"))
    for html in (one, other):
        ids = set(re.findall(r'id="([^"]+)"', html))
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= ids
    assert not set(re.findall(r'id="([^"]+)"', one)) & set(re.findall(r'id="([^"]+)"', other))


def test_a_huge_spike_makes_the_axis_logarithmic_and_says_so() -> None:
    assert "nats, logarithmic" in draw(chart_of([1.0] * 50 + [500.0]))
    assert "logarithmic" not in draw(chart_of([1.0] * 50 + [5.0]))


def test_faults_and_plan_changes_are_marked_and_in_the_legend() -> None:
    html = draw(chart_of([3.0, 2.0, 1.0], faults=(1, 1, 2), changes=(2,)))
    assert "fault" in html
    assert "plan change" in html
    assert len(re.findall(r"var\(--bad\)", html)) == 3  # two distinct steps and the legend


def test_thousands_of_marks_stay_bounded() -> None:
    html = draw(chart_of(list(np.linspace(3, 1, 100)), faults=tuple(range(50_000))))
    assert len(re.findall(r"var\(--bad\)", html)) <= 301


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [-1.0, 1e30], [1e-12, 2e-12], [5.0]])
def test_odd_values_are_drawn_or_named_as_missing(values: list[float]) -> None:
    html = draw(chart_of(values))
    assert ("No values were recorded." in html) == (not values)


def test_the_same_chart_gives_the_same_bytes() -> None:
    assert draw(chart_of([1.0, 2.0])) == draw(chart_of([1.0, 2.0]))


def test_words_for_those_who_do_not_see_the_picture() -> None:
    assert describe("Loss", np.array([3.0, np.nan, 1.0])) == "Loss over steps: first 3, last 1, lowest 1, highest 3"
    assert describe("Loss", np.array([np.nan])) == "Loss: no values"
