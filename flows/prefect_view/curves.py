"""Bounded curves and their picture: a few hundred points whatever the run's length, drawn as an SVG data URL.

Prefect shows pictures on a light or a dark page and does not tell them which: there is no background, and every colour is a middle one
that is seen on both.
"""

import base64
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mem_core.infrastructure.telemetry.metrics import rolling_mean

MAX_POINTS = 240
FEW_POINTS = 20
TEXT, GRID = "#7a7e84", "#8888884d"
BLUE, ORANGE, GREEN = "#3b82e6", "#c2630a", "#2b8a57"
_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 30, 30  # room for letters that can still be read on a telephone

Points = Sequence[tuple[int, float]]


@dataclass
class Curve:
    """(step, value) pairs; when full, every second one is dropped and only every second new one is kept, and so on."""

    points: list[tuple[int, float]] = field(default_factory=list)
    newest: tuple[int, float] | None = None
    _stride: int = 1
    _num_seen: int = 0

    def add(self, step: int, value: float | None) -> None:
        """Keep a point; a step that is not above the last one takes back what was lost, a value that is no number is left out."""
        if value is None or not math.isfinite(value):
            return
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        self.newest = (step, value)
        self._num_seen += 1
        if self._num_seen % self._stride == 0:
            self.points.append((step, value))
        if len(self.points) >= MAX_POINTS:
            del self.points[::2]
            self._stride *= 2

    @property
    def drawn(self) -> Points:
        """The points, the newest always among them."""
        return self.points if self.newest in (None, *self.points[-1:]) else [*self.points, self.newest]

    def smoothed(self) -> Points:
        """Means over a fifteenth of the points; nothing where there are too few for a mean to say more."""
        points = self.drawn
        if len(points) < FEW_POINTS:
            return []
        means = rolling_mean(np.array([value for _, value in points]), max(3, len(points) // 15))
        return [(step, float(mean)) for (step, _), mean in zip(points, means, strict=True)]


@dataclass(frozen=True)
class Line:
    """What is drawn: `faint` lies behind, `dots` are points on a line of their own."""

    label: str
    points: Points
    colour: str
    faint: bool = False
    dots: bool = False


def curve_lines(curve: Curve, label: str, colour: str) -> list[Line]:
    """A curve and, where it has enough points, its mean in front of it."""
    means = curve.smoothed()
    return [Line(label, curve.drawn, colour, faint=bool(means)), Line("smoothed", means, colour)]


def curve_svg(curve: Curve, title: str, colour: str, unit: str = "", *, from_zero: bool = False) -> str:
    """A picture of one curve, its newest value in words."""
    step, value = curve.drawn[-1]
    return lines_svg(curve_lines(curve, f"{title}: {value_words(value)}{unit} at step {step:,}", colour), from_zero=from_zero)


def value_words(value: float) -> str:
    """`1,234`, `366`, `2.21`, `0.00012`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 100 or 0 < abs(value) < 0.1 else f"{value:.2f}"


def lines_svg(lines: Sequence[Line], *, from_zero: bool = False) -> str:
    """An SVG picture of lines that have points, with round marks on both axes.

    `from_zero`: an amount, whose small changes must not look like large ones.
    """
    lines = [line for line in lines if line.points]
    values = [value for line in lines for _, value in line.points]
    steps = [step for line in lines for step, _ in line.points]
    frame = _Frame.around(steps, values, from_zero)
    names = " ".join(_named(line) for line in lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="16" font-weight="500">',
        *_axes(frame),
        f'<text x="{_WIDTH - _RIGHT}" y="18" text-anchor="end">{names}</text>',
        *(part for line in lines for part in _drawn(line, frame)),
        "</svg>",
    ]
    return "".join(parts)


def _named(line: Line) -> str:
    faint = ' fill-opacity="0.7"' if line.faint else ""
    return f'<tspan fill="{line.colour}"{faint} dx="10">{"● " if line.dots else "— "}{line.label}</tspan>'


def data_url(svg: str) -> str:
    """The picture as a URL that Markdown can embed."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


@dataclass(frozen=True)
class _Frame:
    """Bounds of both axes, and where on the picture a point lies."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def around(cls, steps: Sequence[int], values: Sequence[float], from_zero: bool) -> "_Frame":
        low, high = min(values), max(values)
        margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
        low, high = (0.0, high * 1.2 or 1.0) if from_zero else (low - margin, high + margin)
        return cls(min(steps), max(max(steps), min(steps) + 1), low, high)

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _TOP + (self.high - value) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)


def round_marks(low: float, high: float, most: int) -> list[float]:
    """Marks between `low` and `high`, at most `most` and one more, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    apart = next(apart for times in (1, 2, 5, 10, 20) if (high - low) / (apart := times * power) <= most)
    return [number * apart for number in range(math.ceil(low / apart), math.floor(high / apart) + 1)]


def mark_words(marks: Sequence[float]) -> list[str]:
    """As many decimals as tell the marks apart: `2`, `2.5`, `0.00002`, `12,000`."""
    apart = min((after - before for before, after in itertools.pairwise(marks)), default=1.0)
    decimals = max(0, -math.floor(math.log10(apart) + 1e-9))
    return [f"{mark:,.{decimals}f}" for mark in marks]


def _axes(frame: _Frame) -> list[str]:
    parts: list[str] = []
    heights = round_marks(frame.low, frame.high, 5)
    for value, words in zip(heights, mark_words(heights), strict=True):
        y = frame.y(value)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 5.5:.1f}" fill="{TEXT}" text-anchor="end">{words}</text>')
    steps = [mark for mark in round_marks(frame.first, frame.last, 6) if mark == int(mark)]
    for step, words in zip(steps, mark_words(steps), strict=True):
        x = frame.x(step)
        anchor = "end" if x > _WIDTH - 40 else "middle"
        parts.append(f'<line x1="{x:.1f}" y1="{_HEIGHT - _BOTTOM}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM + 4}" stroke="{TEXT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" fill="{TEXT}" text-anchor="{anchor}">{words}</text>')
    return parts


def _drawn(line: Line, frame: _Frame) -> list[str]:
    path = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in line.points)
    width, opacity = ("1", ' stroke-opacity="0.55"') if line.faint else ("2", "")
    parts = [f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="{width}"{opacity}/>']
    marked = line.points if line.dots and len(line.points) <= MAX_POINTS // 6 else [] if line.faint else line.points[-1:]
    return parts + [f'<circle cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3" fill="{line.colour}"/>' for step, value in marked]
