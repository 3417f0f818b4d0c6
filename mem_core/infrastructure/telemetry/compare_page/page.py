"""The comparison as one HTML page that needs nothing from outside and no script."""

import json
from collections.abc import Sequence
from typing import Any

from mem_core.domain.units import format_seconds
from mem_core.infrastructure.telemetry.charts import Chart, Series, describe, draw, run_look
from mem_core.infrastructure.telemetry.compare_page.data import Comparison, Curve, DigestRow, RunCurves, RunFigures
from mem_core.infrastructure.telemetry.html import Cell, Html, contents, counted, element, join, section, table
from mem_core.infrastructure.telemetry.report_page.style import CSS

LIGHT = ("#2563c9", "#c2570c", "#1f7a4d", "#9333c9", "#c03428", "#0e7c86", "#8f5a00", "#5d6770")
DARK = ("#74a9ff", "#f0a35c", "#5fcf97", "#cf9bff", "#ff7b6e", "#5cd3de", "#e9b44c", "#b4bdc5")
_PRINTED = " @media print { table { font-size: 7pt; } th, td { padding: 2px 3px; } th { white-space: normal; overflow-wrap: anywhere; } }"
_LONGEST_VALUE = 300
_LONGEST_LABEL = 48
_LEGEND_MARK, _LEGEND_ROOM = 8, 90  # in letters: the line before a name, and what stands above a small picture
_FIGURES = (
    "run", "state", "steps", "loss", "best validation", "at step", "last validation", "goodput", "faults", "restarts", "time", "tokens/s",
)  # fmt: skip


def render_comparison(comparison: Comparison, curves: Sequence[RunCurves]) -> str:
    """The page as text. `curves`: in the order of the runs."""
    names = [run.name for run in comparison.runs]
    title = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}: MEM comparison"
    head = join(
        (
            Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html("<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"),
            element("title", title),
            Html(f"<style>{CSS}{_run_css()}</style>"),
        )
    )
    sections = (_curves(comparison, curves), _figures(comparison), _digests(comparison), _settings(comparison), _left_out(comparison))
    heading = element("h1", counted(len(names), "run"), " compared")
    body = element("main", heading, _keys(comparison), contents(sections), *sections, element("footer", "Written by MEM."))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def words_of(row: DigestRow, first: str) -> str:
    """`b and a: the same weights and trajectory`, and how long they were the same run."""
    if (row.weights, row.trajectory) == ("the same", "the same"):
        return f"{row.name} and {first}: the same weights and trajectory"
    told = f"{row.name} and {first}: weights {row.weights}, trajectory {row.trajectory}"
    until = f"; the same weights up to step {row.same_until:,}" if row.same_until is not None else ""
    return told + until + (f", others from step {row.other_from:,} on" if row.other_from is not None else "")


def shown_value(value: Any) -> str:
    """A setting as it is shown: text as it is, everything else as JSON; a long one cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


def figure_cells(run: RunFigures) -> tuple[Cell, ...]:
    """One for each of the table's columns after the name."""
    steps = f"{run.steps:,}" + (f" of {run.max_steps:,}" if run.max_steps else "")
    return (
        run.status, steps, _number(run.loss), _number(run.best_validation), _whole(run.best_validation_step), _number(run.validation),
        f"{run.goodput:.1%}", run.faults, run.restarts, format_seconds(run.time_s), f"{run.tokens_per_s:,.0f}",
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _whole(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _run_css() -> str:
    light = " ".join(f"--run{number}: {colour};" for number, colour in enumerate(LIGHT))
    dark = " ".join(f"--run{number}: {colour};" for number, colour in enumerate(DARK))
    return f":root {{ {light} }} @media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}{_PRINTED}"


def _key(number: int) -> Html:
    return element("span", css="key", style=f"background:var(--{run_look(number)[0]})")


def _keys(comparison: Comparison) -> Html:
    shown = [element("span", _key(number), run.name, css="moment") for number, run in enumerate(comparison.runs)]
    return element("p", *(part for each in shown for part in (each, " ")), css="headline")


def _figures(comparison: Comparison) -> Html:
    rows: list[tuple[Cell, ...]] = [(join((_key(number), run.name)), *figure_cells(run)) for number, run in enumerate(comparison.runs)]
    origins: list[tuple[Cell, ...]] = [(run.name, run.forked_from or "–", run.place) for run in comparison.runs]
    note = "Loss: the mean around the last step where steps were recorded. Goodput and time are of the run's own attempts."
    figures = table("Runs", _FIGURES, rows, empty="")
    return section("Figures", figures, table("Where they are", ("run", "began", "folder"), origins, empty=""), note=note)


def _digests(comparison: Comparison) -> Html:
    first = comparison.runs[0].name
    rows: list[tuple[Cell, ...]] = [
        (run.name, run.steps, element("code", run.trajectory_digest or "–"), element("code", run.weights_digest or "–"))
        for run in comparison.runs
    ]
    said = [element("p", words_of(row, first)) for row in comparison.digests]
    return section("Digests", *said, table("At the last step", ("run", "step", "trajectory", "weights"), rows, empty=""))


def _settings(comparison: Comparison) -> Html:
    header = ("field", *(run.name for run in comparison.runs))
    rows: list[tuple[Cell, ...]] = [(row.field, *(shown_value(value) for value in row.values)) for row in comparison.settings]
    # The page's tables keep their last rows: no request has as many fields.
    return section("Settings that differ", table("By field; null where there is none", header, rows, empty="No setting differs."))


def _left_out(comparison: Comparison) -> Html:
    rows: list[tuple[Cell, ...]] = [(run.name, problem) for run in comparison.runs for problem in run.problems]
    return section("Notes", table("Left out because it could not be read", ("run", "what"), rows, empty="")) if rows else Html("")


def _curves(comparison: Comparison, curves: Sequence[RunCurves]) -> Html:
    names = [run.name for run in comparison.runs]
    charts = (
        _chart("Training loss", "loss per token (nats), smoothed", [(name, each.loss) for name, each in zip(names, curves, strict=True)]),
        _validation(names, curves),
        _chart("Learning rate", "", [(name, each.learning_rate) for name, each in zip(names, curves, strict=True)], wide=False),
    )
    coarse = [name for name, each in zip(names, curves, strict=True) if each.by_segment and each.loss.steps.size]
    note = f"Of {', '.join(coarse)} there are no recorded steps here: a point is the last loss of a segment." if coarse else ""
    return section("Curves", element("div", *(draw(chart) for chart in charts), css="charts"), note=note)


def _chart(title: str, unit: str, curves: Sequence[tuple[str, Curve]], *, wide: bool = True) -> Chart:
    series = tuple(Series(_label(name), curve.steps, curve.values, "run", number) for number, (name, curve) in enumerate(curves))
    alt = "; ".join(describe(f"{title} of {name}", curve.values) for name, curve in curves)
    return Chart(title, alt, unit, series, wide=wide, legend=_fits(series))


def _validation(names: Sequence[str], curves: Sequence[RunCurves]) -> Chart:
    """A line for each set of each run in the run's colour; the name of the set where there is more than one."""
    found = [(number, name, curve) for number, (name, each) in enumerate(zip(names, curves, strict=True)) for curve in each.validation]
    several = len({curve.label for _, _, curve in found}) > 1
    series = tuple(
        Series(_label(f"{name}: {curve.label}" if several else name), curve.steps, curve.values, "run points", number)
        for number, name, curve in found
    )
    alt = "; ".join(describe(f"Loss of {curve.label} of {name}", curve.values) for _, name, curve in found)
    return Chart("Loss of held-out rows", alt, "loss per token (nats)", series, legend=_fits(series))


def _fits(series: Sequence[Series]) -> bool:
    """Whether a legend has room over the picture; the names stand with their colours at the top of the page in any case."""
    return sum(len(each.label) + _LEGEND_MARK for each in series) <= _LEGEND_ROOM


def _label(text: str) -> str:
    """Text of a legend: no dollar sign, which would begin a formula, and no underline in front, which would hide it."""
    plain = "".join(character if character.isprintable() and character != "$" else "?" for character in text).lstrip("_")
    return plain if len(plain) <= _LONGEST_LABEL else f"{plain[:_LONGEST_LABEL]}..."
