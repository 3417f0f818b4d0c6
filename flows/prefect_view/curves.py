"""Bounded curves and their picture: a few hundred points whatever the run's length, drawn as an SVG data URL."""

import base64
import math
from dataclasses import dataclass, field

MAX_POINTS = 240
_WIDTH, _HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 26, 24


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


def curve_svg(
    curve: Curve, title: str, colour: str, unit: str = "", level: tuple[str, float] | None = None, from_zero: bool = False
) -> str:
    """An SVG picture of a curve with its bounds in words; `level` is a line to compare with, such as a memory limit.

    `from_zero`: an amount, whose small changes must not look like large ones.
    """
    points = curve.points if curve.newest in (None, *curve.points[-1:]) else [*curve.points, curve.newest]
    values = [value for _, value in points] + ([level[1]] if level else [])
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = 0.0 if from_zero else low - margin, high * 1.2 if from_zero else high + margin
    steps = [step for step, _ in points]
    path = " ".join(f"{_x(step, steps):.1f},{_y(value, low, high):.1f}" for step, value in points)
    newest = points[-1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="17" fill="#333" font-weight="bold">{title}: {_number(newest[1])}{unit} at step {newest[0]:,}</text>',
        *_axis(low, high, steps),
        *(_level(level, low, high) if level else ()),
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>',
        f'<circle cx="{_x(newest[0], steps):.1f}" cy="{_y(newest[1], low, high):.1f}" r="3" fill="{colour}"/>',
        "</svg>",
    ]
    return "".join(parts)


def data_url(svg: str) -> str:
    """The picture as a URL that Markdown can embed."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _axis(low: float, high: float, steps: list[int]) -> list[str]:
    parts: list[str] = []
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        y = _y(value, low, high)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" fill="#777" text-anchor="end">{_number(value)}</text>')
    for step, anchor in ((steps[0], "start"), (steps[-1], "end")):
        parts.append(f'<text x="{_x(step, steps):.1f}" y="{_HEIGHT - 7}" fill="#777" text-anchor="{anchor}">step {step:,}</text>')
    return parts


def _level(level: tuple[str, float], low: float, high: float) -> list[str]:
    y = _y(level[1], low, high)
    return [
        f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#b33" stroke-dasharray="5 4"/>',
        f'<text x="{_WIDTH - _RIGHT - 4}" y="{y - 5:.1f}" fill="#b33" text-anchor="end">{level[0]}</text>',
    ]


def _x(step: int, steps: list[int]) -> float:
    span = max(steps[-1] - steps[0], 1)
    return _LEFT + (step - steps[0]) / span * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, low: float, high: float) -> float:
    return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 100 else f"{value:.2f}"
