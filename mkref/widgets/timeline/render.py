"""The timeline without a kernel: a row per SM, a bar per task, hatched where the SM waits.

Tasks that ran beside the others of their SM have a thin lane under them, without their waiting,
which holds nobody up.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count, takewhile
from typing import TYPE_CHECKING

from mkref.trace.summary import by_op, describe, format_ns
from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import GRID, OUTLINE, WAIT, style_of
from mkref.widgets.svg import Svg, rect_path

if TYPE_CHECKING:
    from mkref.trace.events import Event, Trace
    from mkref.widgets.timeline.model import Timeline

__all__ = ["figure", "headline", "ticks"]

WIDTH, LEFT, RIGHT = 900, 58, 14
TOP, ROW, BAR, AXIS = 74, 22, 17, 34
THIN, GAP = 4, 1  # the lane of what runs beside, and the space above it
LEGEND_COLUMN, LEGEND_COLUMNS = 140, 6
MAX_LETTERS = 600
DIGIT = 7.2  # pixels: width of a digit of an axis label, at most
THINNEST = 0.4  # pixels: what is shorter is drawn this wide, so that it can be seen


def ticks(begin: float, end: float, n_most: int = 8) -> list[float]:
    """Round positions on an axis: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 1000, 5)
    [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]
    """
    span = end - begin
    steps = (base * 10.0**power for power in count(-3) for base in (1, 2, 5))
    step = next(step for step in steps if span / step <= n_most)
    first = -(-begin // step)
    inside = takewhile(lambda k: k * step <= end, count(int(first)))
    return [k * step for k in inside]


def headline(trace: Trace, title: str = "") -> str:
    """The sentence about the whole step; the live view, which shows all of it, says no more."""
    machine = title or trace.where
    label = trace.provenance.get("label", "measured")
    head = f"{machine} [{label}]: " if machine else f"[{label}] "
    return f"{head}{describe(trace)}"


def summary(view: Timeline, title: str) -> str:
    """The sentences under the picture: the step, and which part of it is drawn."""
    return f"{headline(view.trace, title)} {view.scope}"


def table(view: Timeline) -> Table:
    """Time per operation of the whole trace, added over all SMs."""
    rows = by_op(view.trace)
    total = sum(row.work_ns for row in rows if not row.beside) or 1
    return Table(
        ("operation", "tasks", "work", "share of work", "wait", "longest task"),
        tuple(
            (
                row.op, str(row.n_tasks), format_ns(row.work_ns),
                "beside" if row.beside else f"{row.work_ns / total:.1%}",
                format_ns(row.wait_ns), format_ns(row.longest_ns),
            )
            for row in rows
        ),
    )  # fmt: skip


class _Picture:
    """Draws one timeline; bars of one look become one path, which keeps the file small."""

    def __init__(self, view: Timeline, title: str) -> None:
        self.view = view
        height = TOP + ROW * len(view.sms) + AXIS
        self.svg = Svg(WIDTH, height, summary(view, title))
        self.bar_height = BAR - THIN - GAP if view.trace.beside.any() else BAR
        self.scale = (WIDTH - LEFT - RIGHT) / (view.end - view.begin)
        self.tasks: dict[str, list[str]] = defaultdict(list)
        self.waits: list[str] = []
        self.letters: list[tuple[float, float, str]] = []

    def x(self, ns: float) -> float:
        return LEFT + (min(max(ns, self.view.begin), self.view.end) - self.view.begin) * self.scale

    def bar(self, event: Event, y: float) -> None:
        begin, ready, end = self.x(event.begin), self.x(event.ready), self.x(event.end)
        width, height = max(end - ready, THINNEST), self.bar_height
        if event.beside:
            y, height = y + BAR - THIN, THIN
        elif ready - begin >= THINNEST:
            self.waits.append(rect_path(begin, y, ready - begin, height))
        self.tasks[event.op].append(rect_path(ready, y, width, height))
        if width >= 12 and not event.beside:
            self.letters.append(((ready + end) / 2, y + height / 2 + 4.5, event.op))

    def legend(self) -> None:
        ops = [op for op in self.view.trace.ops if op in self.tasks]
        for i, op in enumerate([*ops, "waits for inputs"]):
            x = LEFT + i % LEGEND_COLUMNS * LEGEND_COLUMN
            y = 14 + i // LEGEND_COLUMNS * 24
            waits = i == len(ops)
            style = style_of(op)
            fill = self.hatch() if waits else self.svg.fill(style.fill, style.pattern)
            self.svg.rect(x, y, 22, 15, fill, stroke=OUTLINE)
            if not waits:
                self.svg.text(x + 11, y + 12, style.letter, anchor="middle", color=style.ink)
            self.svg.text(x + 28, y + 12, op)

    def hatch(self) -> str:
        return self.svg.fill("#ffffff", "diagonal", WAIT)

    def axis(self) -> None:
        bottom = TOP + ROW * len(self.view.sms)
        for tick in ticks(self.view.begin, self.view.end):
            self.svg.rect(self.x(tick), TOP - 6, 0.5, bottom - TOP + 12, GRID)
            label = format_ns(tick)
            x = min(self.x(tick), WIDTH - 2 - DIGIT / 2 * len(label))  # all of it on the page
            self.svg.text(x, bottom + 22, label, anchor="middle", size=11)

    def render(self) -> str:
        for lane, sm in enumerate(self.view.sms):
            for event in self.view.bars(sm):
                self.bar(event, TOP + lane * ROW)
        self.legend()
        self.axis()
        for lane, sm in enumerate(self.view.sms):
            self.svg.text(LEFT - 8, TOP + lane * ROW + 13, f"SM {sm}", anchor="end")
        if self.waits:
            self.svg.path("".join(self.waits), self.hatch(), stroke=WAIT)
        for op, rectangles in self.tasks.items():
            style = style_of(op)
            fill = self.svg.fill(style.fill, style.pattern)
            self.svg.path("".join(rectangles), fill, stroke=OUTLINE)
        for x, y, op in self.letters[:MAX_LETTERS]:
            style = style_of(op)
            self.svg.text(x, y, style.letter, anchor="middle", size=11, color=style.ink)
        return self.svg.render()


def figure(view: Timeline, title: str = "") -> Figure:
    """Picture, sentence and table.

    Args:
        view: what to show.
        title: first words of the sentence; default: the machine in the trace's provenance.
    """
    return Figure(_Picture(view, title).render(), summary(view, title), table(view))
