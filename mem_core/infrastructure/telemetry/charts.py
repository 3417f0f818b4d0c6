"""Charts as inline SVG, drawn by matplotlib without pyplot, coloured by the page's own CSS variables (light and dark)."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from mem_core.infrastructure.telemetry.html import Html, element, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib wants real colours: these stand for CSS variables and are put back in the finished SVG.
_COLOURS = {"fg": "#010203", "muted": "#010204", "line": "#010205", "accent": "#010206", "second": "#010207", "bad": "#010208"}
RUN_COLOURS = tuple(f"run{number}" for number in range(8))
_COLOURS |= {name: f"#01030{number}" for number, name in enumerate(RUN_COLOURS)}
_RUN_STYLES = ("-", "--", ":")
_MAX_MARKS = 300
_MAX_LINES = 40  # more marks than that are short ticks at the top, so that they do not hide the curve
_MAX_DOTS = 60
_ROUND = [1, 2, 5, 10]  # marks of an axis are 1, 2 or 5 times a power of ten apart
_WIDE_INCHES, _NARROW_INCHES = (10.6, 3.1), (5.2, 2.5)
_MARGINS_INCHES = (0.5, 0.42, 0.1, 0.28)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart. x, y: (n,), already thinned. `faint` lies behind, `main` in front, `points` and
    `more` are dots on a line, `level` and `limit` are dashed. `run` and `run points` belong to the run of that `number`."""

    label: str
    x: NDArray[np.generic]
    y: NDArray[np.generic]
    look: Literal["faint", "main", "points", "more", "level", "limit", "run", "run points"] = "main"
    number: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """What to draw. `alt` says in words what the picture shows; marks are steps at which something happened. `legend` off: the page has
    the names elsewhere."""

    title: str
    alt: str
    y_label: str
    series: tuple[Series, ...]
    faults: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()
    wide: bool = False
    legend: bool = True


def draw(chart: Chart) -> Html:
    """The chart as `<figure>` with an inline SVG that needs nothing from outside."""
    shown = tuple(series for series in chart.series if series.x.size)
    if all(series.look == "limit" for series in shown):
        return element("figure", element("figcaption", chart.title), element("p", "No values were recorded.", css="quiet"), css="chart")
    is_log = _needs_log(shown)
    unit = element("small", f" {chart.y_label}{', logarithmic' if is_log else ''}")
    pictures = [element("div", Html(_svg(chart, shown, is_log=is_log, wide=False)), css="at-narrow" if chart.wide else "")]
    if chart.wide:  # its letters would be too small on a telephone
        pictures.insert(0, element("div", Html(_svg(chart, shown, is_log=is_log, wide=True)), css="at-wide"))
    picture = element("div", *pictures, role="img", aria_label=chart.alt)
    return element("figure", element("figcaption", chart.title, unit), picture, css="chart wide" if chart.wide else "chart")


def _values(shown: Sequence[Series]) -> NDArray[np.float64]:
    return np.concatenate([series.y.astype(np.float64) for series in shown])


def _needs_log(shown: Sequence[Series]) -> bool:
    """True where a spike would flatten everything else."""
    values = _values(shown)
    return bool(values.min() > 0 and values.max() > 12 * np.median(values))


def _svg(chart: Chart, shown: Sequence[Series], *, is_log: bool, wide: bool) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": f"{chart.title} {wide}", "path.simplify_threshold": 0.3, "font.size": 8.5}
    ):
        width, height = _WIDE_INCHES if wide else _NARROW_INCHES
        left, bottom, right, top = _MARGINS_INCHES
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height))
        _style(axes)
        for series in shown:
            _plot(axes, series)
        _scale(axes, _values(shown), is_log=is_log)
        _marks(axes, chart)
        if chart.legend:
            _legend(axes, num_columns=6 if wide else 4)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue())


def _style(axes: "Axes") -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_COLOURS["line"])
    axes.grid(axis="y", color=_COLOURS["line"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_COLOURS["muted"], length=3, width=0.6)
    axes.set_xlabel("step", color=_COLOURS["muted"])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=_ROUND))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _plot(axes: "Axes", series: Series) -> None:
    match series.look:
        case "faint":
            axes.plot(series.x, series.y, color=_COLOURS["accent"], alpha=0.3, linewidth=0.7, label=series.label)
        case "main":
            axes.plot(series.x, series.y, color=_COLOURS["accent"], linewidth=1.4, label=series.label)
        case "points" | "more":
            line = "-" if series.look == "points" else ":"
            dots = f"o{line}" if series.x.size <= _MAX_DOTS else line
            axes.plot(series.x, series.y, dots, color=_COLOURS["second"], linewidth=0.9, markersize=2.5, label=series.label)
        case "run" | "run points":
            name, style = run_look(series.number)
            dots = "o" if series.look == "run points" and series.x.size <= _MAX_DOTS else ""
            axes.plot(series.x, series.y, f"{dots}{style}", color=_COLOURS[name], linewidth=1.3, markersize=2.8, label=series.label)
        case "level":
            axes.plot(series.x, series.y, "--", color=_COLOURS["second"], linewidth=1.2, label=series.label)
        case "limit":
            axes.plot(series.x, series.y, "--", color=_COLOURS["bad"], linewidth=1.1, label=series.label)


def run_look(number: int) -> tuple[str, str]:
    """(CSS variable of the colour, style of the line) of a run: other lines where the colours are used up."""
    return RUN_COLOURS[number % len(RUN_COLOURS)], _RUN_STYLES[number // len(RUN_COLOURS) % len(_RUN_STYLES)]


def _scale(axes: "Axes", values: NDArray[np.float64], *, is_log: bool) -> None:
    """Logarithmic on request; else from zero where zero is near anyway."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_minor_formatter(NullFormatter())
        return
    low, high = float(values.min()), float(values.max())
    whole = bool((values == np.round(values)).all())
    if 0 <= low < 0.5 * high:
        axes.set_ylim(0, high * 1.06)
    elif low == high and whole:
        axes.set_ylim(low - 1, high + 1)
    elif low == high:
        axes.set_ylim(low - max(abs(low) * 0.5, 1e-9), high + max(abs(high) * 0.5, 1e-9))
    _linear_ticks(axes, high, whole=whole)


def _linear_ticks(axes: "Axes", high: float, *, whole: bool) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=whole, steps=_ROUND))
    if high >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif 0 < high < 0.01:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}".replace("e-0", "e-") if value else "0"))


def _marks(axes: "Axes", chart: Chart) -> None:
    for steps, colour, style, label in (
        (chart.faults, "bad", ":", "fault"),
        (chart.changes, "second", "-.", "plan change"),
    ):
        unique = sorted(set(steps))
        kept = unique if len(unique) <= _MAX_MARKS else [unique[round(i * (len(unique) - 1) / (_MAX_MARKS - 1))] for i in range(_MAX_MARKS)]
        for number, step in enumerate(kept):
            looks = ("-", 0.94) if len(unique) > _MAX_LINES else (style, 0.0)
            name = "" if number else label
            axes.axvline(step, looks[1], color=_COLOURS[colour], linestyle=looks[0], linewidth=0.8, alpha=0.75, label=name)


def _legend(axes: "Axes", num_columns: int) -> None:
    if len(axes.get_legend_handles_labels()[1]) < 2:
        return
    legend = axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.01, 0.99),
        ncols=num_columns,
        frameon=False,
        labelcolor=_COLOURS["fg"],
        borderaxespad=0.1,
        columnspacing=1.2,
    )
    for line in legend.get_lines():
        line.set_alpha(max(line.get_alpha() or 1.0, 0.5))
        line.set_linewidth(1.6)


def _inline(svg: str) -> str:
    """Only the `<svg>` element, scalable, with CSS variables for colours and no ids but those that it refers to itself."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true" focusable="false">', body, count=1)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    for name, colour in _COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    return body.strip()


def describe(label: str, values: NDArray[np.generic]) -> str:
    """Words for those who do not see the picture: first, last, lowest and highest finite value."""
    finite = values.astype(np.float64)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return f"{escape(label)}: no values"
    return f"{label} over steps: first {finite[0]:.4g}, last {finite[-1]:.4g}, lowest {finite.min():.4g}, highest {finite.max():.4g}"
