"""Schematic timelines: who does what, one after another, drawn without a clock.

For the pictures of lessons that explain an order and not a measurement; measured runs have
`mkref.widgets.sm_timeline`. A lane is a row, a span a labelled stretch of it; looks differ in
pattern as well as in colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import GRID, INK, OUTLINE, style_of
from mkref.widgets.svg import Svg

__all__ = ["IDLE", "Look", "Span", "lanes_figure", "op_look"]

WIDTH, ROW, TOP, LETTER = 760, 28, 44, 7


@dataclass(frozen=True)
class Look:
    """How one kind of span looks, and what the legend says of it."""

    says: str
    color: str
    pattern: str = "plain"
    ink: str = INK


IDLE = Look("waits", "#ffffff", "diagonal")


def op_look(op: str, says: str = "") -> Look:
    """How an operation looks in all pictures; the legend says its name, or `says`."""
    style = style_of(op)
    return Look(says or op, style.fill, style.pattern, style.ink)


@dataclass(frozen=True)
class Span:
    """From `begin` to `end`, in any unit; `kind` is a key of the looks."""

    begin: float
    end: float
    kind: str
    label: str = ""


def _in_words(span: Span, looks: Mapping[str, Look]) -> str:
    """A span in the table: its label, after its kind where the label is only a time."""
    says = looks[span.kind].says
    is_time = span.label.endswith(" us") and "," not in span.label
    return f"{says} {span.label}" if is_time else span.label or says


def lanes_figure(
    head: str,
    sentence: str,
    lanes: Sequence[tuple[str, Sequence[Span]]],
    looks: Mapping[str, Look],
) -> Figure:
    """A picture of lanes with a legend, its sentence, and the same as a table.

    Args:
        head: the line above the picture.
        sentence: what it shows, also its alternative text; say that it is a scheme.
        lanes: name and spans of each row, from top to bottom; a row without spans is a heading.
        looks: of the kinds of spans.
    """
    left = 28 + LETTER * max(len(name) for name, spans in lanes if spans)
    last = max(span.end for _, spans in lanes for span in spans)
    scale = (WIDTH - left - 20) / last
    height = TOP + ROW * len(lanes) + 34
    svg = Svg(WIDTH, height, sentence)
    svg.text(16, 26, head, size=16, bold=True)
    for row, (name, spans) in enumerate(lanes):
        y = TOP + ROW * row
        svg.text(16, y + 18, name, bold=not spans)
        if spans:
            svg.rect(left, y + ROW - 2, WIDTH - left - 20, 1, GRID)
        for span in spans:
            look, x = looks[span.kind], left + span.begin * scale
            width = (span.end - span.begin) * scale
            fill = svg.fill(look.color, look.pattern)
            svg.rect(x, y + 3, width, ROW - 7, fill, stroke=OUTLINE)
            if span.label and len(span.label) * LETTER <= width:
                svg.text(x + width / 2, y + 18, span.label, anchor="middle", color=look.ink)
    x = 16.0
    for look in looks.values():
        svg.rect(x, height - 24, 14, 12, svg.fill(look.color, look.pattern), stroke=OUTLINE)
        svg.text(x + 20, height - 13, look.says)
        x += 36 + LETTER * len(look.says)
    rows = [(name, ", ".join(_in_words(span, looks) for span in spans)) for name, spans in lanes]
    return Figure(svg.render(), sentence, Table(("who", "does, one after another"), tuple(rows)))
