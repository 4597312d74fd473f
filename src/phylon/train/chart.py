"""Line charts as SVG, drawn by ourselves: axes with round ticks, linear or logarithmic, nothing to load."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[float, float]]
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760.0, 56.0, 16.0, 12.0, 28.0
MOST_POINTS = 500
LOG_FROM = 50  # a range of values wider than this factor is drawn on a logarithmic axis
ZERO_FROM = 4  # one wider than this starts at 0


class Line(NamedTuple):
    """One line: its CSS class says how it looks; ``label`` is for the legend ("" leaves it out)."""

    points: Points
    style: str
    label: str = ""
    dots: bool = False


def line_chart(lines: Sequence[Line], *, height: float, x_label: str, title: str) -> str:
    """An ``<svg>`` of all lines on common axes; "" where there is nothing to draw."""
    lines = [line._replace(points=_thin(_finite(line.points))) for line in lines]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    if not ys:
        return ""
    log = min(ys) > 0 and max(ys) / min(ys) > LOG_FROM
    low = 0.0 if not log and 0 <= min(ys) * ZERO_FROM <= max(ys) else min(ys)
    least = 1.0 if all(float(x).is_integer() for x in xs) else 0.0  # nothing lies between two steps
    x_axis, y_axis = _Axis(min(xs), max(xs), False, least), _Axis(low, max(ys), log)
    right, bottom = WIDTH - RIGHT, height - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x_axis.share(x) * (right - LEFT), bottom - y_axis.share(y) * (bottom - TOP)

    parts = [f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}">']
    for value in y_axis.ticks():
        y = place(x_axis.low, value)[1]
        parts.append(f'<path class="grid" d="M{LEFT:g} {y:.1f}H{right:g}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8:g}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in x_axis.ticks():
        x = place(value, y_axis.low)[0]
        parts.append(f'<path class="grid" d="M{x:.1f} {bottom:g}v4"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17:g}" text-anchor="middle">{_number(value)}</text>')
    parts.append(f'<text class="tick" x="{LEFT - 20:g}" y="{bottom + 17:g}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT:g} {bottom:g}H{right:g}"/>')
    for line in lines:
        spots = [place(x, y) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        if len(spots) > 1:
            parts.append(f'<path class="line {line.style}" d="M{path}"/>')
        if line.dots or len(spots) == 1:
            parts += [f'<circle class="dot {line.style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in spots]
    return "".join([*parts, *_legend(lines), "</svg>"])


def smooth(points: Points, window: int) -> Points:
    """An exponential mean over about ``window`` points, unbiased at the start; of logarithms where all are above 0."""
    points = _finite(points)
    if window <= 1 or not points:
        return points
    into, back = (math.log, math.exp) if min(y for _, y in points) > 0 else (float, float)
    keep, total, weight, found = 1 - 1 / window, 0.0, 0.0, []
    for x, y in points:
        total, weight = keep * total + into(y), keep * weight + 1
        found.append((x, back(total / weight)))
    return found


class _Axis:
    def __init__(self, low: float, high: float, log: bool, least: float = 0.0) -> None:
        if low == high:
            low, high = low - 0.5, high + 0.5
        self.low, self.high, self.log, self.least = low, high, log, least

    def share(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers]
        rough = (self.high - self.low) / 5
        base = 10 ** math.floor(math.log10(rough))
        step = max(self.least, next(m * base for m in (1, 2, 5, 10) if m * base >= rough))
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def _legend(lines: Sequence[Line]) -> list[str]:
    x, parts = WIDTH - RIGHT, []
    for line in reversed([line for line in lines if line.label]):
        x -= 7.2 * len(line.label)
        parts.append(f'<text class="legend" x="{x:g}" y="{TOP + 8:g}">{escape(line.label)}</text>')
        x -= 26
        parts.append(f'<path class="line {line.style}" d="M{x:g} {TOP + 4:g}h18"/>')
        x -= 18
    return parts


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``MOST_POINTS`` points: means of neighbours, the ends kept as they are."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil((len(points) - 2) / (MOST_POINTS - 2))
    groups = [points[i : min(i + size, len(points) - 1)] for i in range(1, len(points) - 1, size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [points[0], *means, points[-1]]


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    if abs(value) >= 1e-3:
        return f"{value:g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"
