"""A chart of horizontal bars with their numbers beside them, for quantities to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mkref.widgets.palette import GRID, INK, OUTLINE
from mkref.widgets.svg import Svg

__all__ = ["Bar", "bar_chart"]

WIDTH, ROW, TOP, BOTTOM = 760, 28, 62, 14
RIGHT = 260  # room for the text beside the longest bar


@dataclass(frozen=True)
class Bar:
    """One bar: name on its left, length, text on its right, colour and pattern."""

    name: str
    value: float
    text: str
    color: str = "#0072B2"
    pattern: str = "plain"


def bar_chart(
    bars: Sequence[Bar],
    *,
    title: str,
    head: str,
    notes: Sequence[str] = (),
    foot: tuple[str, str] | None = None,
    full: float | None = None,
) -> str:
    """An SVG document.

    Args:
        bars: from top to bottom; the longest fills the width.
        title: the picture's alternative text.
        head: the large line at the top left.
        notes: up to two lines at the top right.
        foot: name and text of a last line without a bar.
        full: a value that every bar is seen against, drawn as an empty frame; across a longer bar
            as a line.
    """
    left = 24 + 7 * max(len(bar.name) for bar in bars)  # 7 pixels a letter
    svg = Svg(WIDTH, TOP + ROW * (len(bars) + (foot is not None)) + BOTTOM, title)
    svg.text(16, 28, head, size=20, bold=True)
    for i, note in enumerate(notes[:2]):
        svg.text(WIDTH - 16, 22 + 18 * i, note, anchor="end")
    largest = max(*(bar.value for bar in bars), full or 0) or 1
    frame = (WIDTH - RIGHT - left) * (full or 0) / largest
    for i, bar in enumerate(bars):
        y = TOP + i * ROW
        width = max((WIDTH - RIGHT - left) * bar.value / largest, 1.0)
        svg.text(left - 10, y + 16, bar.name, anchor="end")
        if full is not None:
            svg.rect(left, y + 3, frame, ROW - 8, "none", stroke=OUTLINE)
        svg.rect(left, y + 3, width, ROW - 8, svg.fill(bar.color, bar.pattern), stroke=OUTLINE)
        if full is not None and frame < width:
            svg.rect(left + frame - 3, y, 6, ROW - 2, "#ffffff")
            svg.rect(left + frame - 1, y, 2, ROW - 2, INK)
        svg.text(left + max(width, frame) + 8, y + 16, bar.text)
    if foot is not None:
        y = TOP + ROW * len(bars) + 6
        svg.rect(left, y, WIDTH - left - 16, 1, GRID)
        svg.text(left - 10, y + 22, foot[0], anchor="end", bold=True)
        svg.text(left, y + 22, foot[1], bold=True)
    return svg.render()
