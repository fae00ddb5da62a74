"""Strips of points along one axis, a row for each series: for spread, drift and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkref.widgets.palette import GRID, INK, OUTLINE
from mkref.widgets.svg import Svg, number

__all__ = ["Strip", "strip_chart"]

WIDTH, ROW, TOP, RIGHT = 760, 30, 50, 190
POINT, MARKED = "#56B4E9", "#D55E00"


@dataclass(frozen=True)
class Strip:
    """A row of points.

    Attributes:
        name: on its left.
        points: where they lie on the axis.
        text: on its right.
        marked: numbers of the points that are drawn as squares.
        span: an interval drawn behind the points; None for none.
    """

    name: str
    points: Sequence[float]
    text: str
    marked: Sequence[int] = ()
    span: tuple[float, float] | None = None


def _step(width: float) -> float:
    """A round distance of ticks, so that there are three to eight."""
    return next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if width / s <= 8)


def _circle(x: float, y: float, r: float = 3.5) -> str:
    return f"M{number(x - r)} {number(y)}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 -{2 * r} 0z"


def strip_chart(
    strips: Sequence[Strip], *, title: str, head: str, unit: str, legend: tuple[str, str]
) -> str:
    """An SVG document with an axis in `unit` and a line at 0.

    Args:
        strips: from top to bottom.
        title: the picture's alternative text.
        head: the line above.
        unit: of the axis.
        legend: what a point is, and what a square is; "" leaves one out.
    """
    left = 24 + 7 * max(len(strip.name) for strip in strips)
    ends = [x for s in strips for x in (*s.points, *(s.span or ()))]
    low, high = min(0.0, *ends), max(0.0, *ends)
    pad = 0.04 * (high - low)
    low, high = low - pad, high + pad
    scale = (WIDTH - RIGHT - left) / (high - low)

    def at(value: float) -> float:
        return left + (value - low) * scale

    bottom = TOP + ROW * len(strips)
    svg = Svg(WIDTH, bottom + 58, title)
    svg.text(16, 26, head, size=16, bold=True)
    step = _step(high - low)
    for i in range(int(low / step), int(high / step) + 1):
        x = at(i * step)
        svg.rect(x, TOP, 1, bottom - TOP, INK if i == 0 else GRID)
        svg.text(x, bottom + 16, f"{i * step:g}{unit}", anchor="middle")
    for row, strip in enumerate(strips):
        y = TOP + ROW * row + ROW / 2
        svg.text(left - 10, y + 4, strip.name, anchor="end")
        if strip.span:
            a, b = (at(x) for x in strip.span)
            svg.rect(
                a, y - 11, max(b - a, 1.0), 22, svg.fill("#009E73", "diagonal"), stroke=OUTLINE
            )
        plain = [x for i, x in enumerate(strip.points) if i not in strip.marked]
        if plain:
            svg.path("".join(_circle(at(x), y) for x in plain), POINT, stroke=OUTLINE)
        for i in strip.marked:
            svg.rect(at(strip.points[i]) - 4, y - 4, 8, 8, MARKED, stroke=OUTLINE)
        svg.text(WIDTH - RIGHT + 12, y + 4, strip.text)
    x = 16.0
    for says, square in zip(legend, (False, True), strict=True):
        if says:
            y = bottom + 40
            if square:
                svg.rect(x, y - 8, 8, 8, MARKED, stroke=OUTLINE)
            else:
                svg.path(_circle(x + 4, y - 4), POINT, stroke=OUTLINE)
            svg.text(x + 14, y, says)
            x += 34 + 7 * len(says)
    return svg.render()
