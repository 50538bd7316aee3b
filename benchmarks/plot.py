"""A line chart as SVG: a logarithmic axis across, a linear one up, readable on light and dark
pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 64, 250, 60, 56  # margins; the legend stands in the right one
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; \
fill: #1f2328 }
.title { font-size: 14px; font-weight: 600 } .faint { fill: #59636e } \
.page { fill: #ffffff } .grid { stroke: #d1d9e0 }
.s0 { --c: #0969da } .s1 { --c: #57606a } .s2 { --c: #bf3989 } .s3 { --c: #bc4c00 } \
.s4 { --c: #1a7f37 } .s5 { --c: #8250df }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .faint { fill: #9198a1 } .page { fill: #0d1117 } .grid { stroke: #3d444d }
  .s0 { --c: #4493f8 } .s1 { --c: #9198a1 } .s2 { --c: #f778ba } .s3 { --c: #db6d28 } \
.s4 { --c: #3fb950 } .s5 { --c: #ab7df8 }
}
.line { fill: none; stroke: var(--c); stroke-width: 2 } \
.limit { stroke-dasharray: 5 4; stroke-width: 1.5 } .dot { fill: var(--c) }
"""
COLOURS = 6


@dataclass(frozen=True)
class Series:
    """A line: points (x, y) from left to right. A limit is drawn dashed, without dots."""

    name: str
    points: Sequence[tuple[float, float]]
    limit: bool = False


@dataclass(frozen=True)
class Axes:
    """The ticks span the plot: `across` in equal ratios, `up` in equal distances from 0."""

    across: Sequence[int]
    up: Sequence[int]

    def x(self, value: float) -> float:
        first, last = math.log(self.across[0]), math.log(self.across[-1])
        return LEFT + (math.log(value) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.up[-1] * (HEIGHT - TOP - BOTTOM)


def chart(title: str, x_title: str, y_title: str, axes: Axes, series: Sequence[Series]) -> str:
    """The whole SVG document."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        _text(LEFT, 24, title, "title"),
        *_axes(axes, x_title, y_title),
    ]
    for number, one in enumerate(series):
        parts.append(f'<g class="s{number % COLOURS}">')
        parts += [*_line(axes, one), *_legend(TOP + 8 + 22 * number, one), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(axes: Axes, x_title: str, y_title: str) -> list[str]:
    left, right, bottom = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in axes.up:
        y = axes.y(tick)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, f"{tick}", "faint", "end"))
    parts += [
        _text(axes.x(tick), bottom + 20, _short(tick), "faint", "middle") for tick in axes.across
    ]
    parts.append(_text((left + right) / 2, HEIGHT - 12, x_title, "faint", "middle"))
    parts.append(_text(left - 8, TOP - 16, y_title, "faint", "end"))
    return parts


def _line(axes: Axes, series: Series) -> list[str]:
    places = [(axes.x(x), axes.y(y)) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline class="line{" limit" if series.limit else ""}" points="{path}"/>'
    if series.limit:
        return [line]
    return [
        line,
        *(
            _dot(axes.x(x), axes.y(y), f"{series.name}: {y:.0f} at {_short(x)}")
            for x, y in series.points
        ),
    ]


def _dot(x: float, y: float, label: str) -> str:
    circle = f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
    return f"{circle}<title>{escape(label)}</title></circle>"


def _legend(y: float, series: Series) -> list[str]:
    left = WIDTH - RIGHT + 16
    kind = "line limit" if series.limit else "line"
    line = f'<line class="{kind}" x1="{left}" y1="{y}" x2="{left + 22}" y2="{y}"/>'
    dot = [] if series.limit else [_dot(left + 11, y, series.name)]
    return [line, *dot, _text(left + 30, y + 4, series.name)]


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    start = f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
    return f"{start}{escape(words)}</text>"


def _short(tokens: float) -> str:
    return f"{tokens / 1024:.0f}k" if tokens >= 1024 else f"{tokens:.0f}"
