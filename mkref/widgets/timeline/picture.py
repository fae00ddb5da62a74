"""Draws timelines as SVG: rows of bars, what waits, the edges of a task, the critical path.

A row is one SM of one run. Tasks that ran beside the others of their SM have a thin lane under
them, without their waiting, which holds nobody up. What it does not do: choose what to show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING

from mkref.trace.events import END, READY
from mkref.trace.summary import format_ns
from mkref.widgets.palette import GRID, INK, OUTLINE, WAIT, style_of
from mkref.widgets.svg import Svg, number, rect_path
from mkref.widgets.timeline.edges import NOBODY

if TYPE_CHECKING:
    from mkref.trace.events import Event
    from mkref.widgets.timeline.model import Timeline

__all__ = ["DIGIT", "Row", "draw", "ticks"]

WIDTH, LEFT, RIGHT = 900, 58, 14
TOP, ROW, BAR, AXIS = 74, 22, 17, 34
PAIR_GAP = 8  # between the rows of two SMs, where each has a row per run
THIN, GAP = 4, 1  # the lane of what runs beside, and the space above it
LEGEND_COLUMN, LEGEND_COLUMNS = 140, 6
MAX_LETTERS = 600
MAX_EDGES = 40
FADED = 0.3  # opacity of what is not on the critical path
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


@dataclass(frozen=True)
class Row:
    """One row: an SM of a run, the words on its left, and whether a gap follows."""

    view: Timeline
    sm: int
    label: str
    gap: bool = False


class _Picture:
    """Draws rows; bars of one look become one path, which keeps the file small."""

    def __init__(self, rows: Sequence[Row], title: str) -> None:
        self.rows = rows
        self.views = list({id(row.view): row.view for row in rows}.values())
        self.window = (self.views[0].begin, self.views[0].end)
        self.tops: list[int] = []
        self.bottom = TOP
        for row in rows:
            self.tops.append(self.bottom)
            self.bottom += ROW + (PAIR_GAP if row.gap else 0)
        self.svg = Svg(WIDTH, self.bottom + AXIS, title)
        beside = any(view.trace.beside.any() for view in self.views)
        self.bar_height = BAR - THIN - GAP if beside else BAR
        self.scale = (WIDTH - LEFT - RIGHT) / (self.window[1] - self.window[0])
        # By operation, and whether it is to be faded.
        self.tasks: dict[tuple[str, bool], list[str]] = defaultdict(list)
        self.waits: list[str] = []
        self.letters: list[tuple[float, float, str]] = []

    def x(self, ns: float) -> float:
        begin, end = self.window
        return LEFT + (min(max(ns, begin), end) - begin) * self.scale

    def place(self, view: Timeline, task: int) -> tuple[float, float] | None:
        """Top and height of a task's bar; None if its SM is not shown."""
        for row, top in zip(self.rows, self.tops, strict=True):
            if row.view is view and row.sm == view.trace.columns["sm"][task]:
                if view.trace.beside[task]:
                    return top + BAR - THIN, THIN
                return top, self.bar_height
        return None

    def bar(self, event: Event, y: float, faded: bool) -> None:
        begin, ready, end = self.x(event.begin), self.x(event.ready), self.x(event.end)
        width, height = max(end - ready, THINNEST), self.bar_height
        if event.beside:
            y, height = y + BAR - THIN, THIN
        elif ready - begin >= THINNEST:
            self.waits.append(rect_path(begin, y, ready - begin, height))
        self.tasks[event.op, faded].append(rect_path(ready, y, width, height))
        if width >= 12 and not event.beside:
            self.letters.append(((ready + end) / 2, y + height / 2 + 4.5, event.op))

    def legend(self) -> None:
        drawn = {op for op, _ in self.tasks}
        ops = [*dict.fromkeys(op for view in self.views for op in view.trace.ops if op in drawn)]
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
        for tick in ticks(*self.window):
            self.svg.rect(self.x(tick), TOP - 6, 0.5, self.bottom - TOP + 12, GRID)
            label = format_ns(tick)
            x = min(self.x(tick), WIDTH - 2 - DIGIT / 2 * len(label))  # all of it on the page
            self.svg.text(x, self.bottom + 22, label, anchor="middle", size=11)

    def bars(self) -> None:
        for row, top in zip(self.rows, self.tops, strict=True):
            path = {link.task for link in row.view.edges.path} if row.view.path else None
            for task in row.view.tasks(row.sm):
                faded = path is not None and task not in path
                self.bar(row.view.trace.event(task), top, faded)

    def line(self, points: Sequence[tuple[float, float]], width: float, dash: str = "") -> None:
        """A dark line with a light edge, so that it is seen over any colour."""
        data = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.svg.path(data, "none", stroke="#ffffff", width=width + 2)
        self.svg.path(data, "none", stroke=INK, width=width, dash=dash)

    def hop(self, view: Timeline, a: int, b: int, width: float, dash: str = "") -> None:
        """From the end of task `a` to where task `b` could start; nothing if one is not shown."""
        times = view.trace.times
        begin, end = self.place(view, a), self.place(view, b)
        if begin is None or end is None:
            return
        if max(times[a, END], times[b, READY]) < self.window[0]:
            return
        if min(times[a, END], times[b, READY]) > self.window[1]:
            return
        (ya, ha), (yb, hb) = begin, end
        points = [(self.x(times[a, END]), ya + ha / 2), (self.x(times[b, READY]), yb + hb / 2)]
        self.line(points, width, dash)

    def path(self, view: Timeline) -> None:
        """The critical path: its hops, and a thick line along the work of each of its tasks."""
        for link in view.edges.path:
            if link.cause != NOBODY:
                self.hop(view, link.cause, link.task, 1.5)
        for link in view.edges.path:
            ready, end = view.trace.times[link.task, READY], view.trace.times[link.task, END]
            place = self.place(view, link.task)
            if place is not None and end > self.window[0] and ready < self.window[1]:
                top, height = place
                box = rect_path(self.x(ready), top, self.x(end) - self.x(ready), height)
                self.svg.path(box, "none", stroke=INK, width=2)

    def selected(self, view: Timeline) -> None:
        """A frame around the task; a line from each that it waited for, dashed ones to its own."""
        task = view.selected
        for other in view.edges.waits_for(task)[-MAX_EDGES:]:
            self.hop(view, other, task, 1)
        for other in view.edges.needed_by(task)[:MAX_EDGES]:
            self.hop(view, task, other, 1, "4 3")
        if view.edges.cause[task] != NOBODY:
            self.hop(view, int(view.edges.cause[task]), task, 3)
        place = self.place(view, task)
        if place is not None:
            begin, end = (self.x(view.trace.times[task, k]) for k in (READY, END))
            box = rect_path(begin, place[0] - 1, end - begin, place[1] + 2)
            self.svg.path(box, "none", stroke=INK, width=3)

    def render(self) -> str:
        self.bars()
        self.legend()
        self.axis()
        for row, top in zip(self.rows, self.tops, strict=True):
            self.svg.text(LEFT - 8, top + 13, row.label, anchor="end")
        if self.waits:
            self.svg.path("".join(self.waits), self.hatch(), stroke=WAIT)
        for (op, faded), rectangles in self.tasks.items():
            style = style_of(op)
            fill = self.svg.fill(style.fill, style.pattern)
            opacity = FADED if faded else 1.0
            self.svg.path("".join(rectangles), fill, stroke=OUTLINE, opacity=opacity)
        for view in self.views:
            if view.path:
                self.path(view)
            if view.selected != NOBODY:
                self.selected(view)
        for x, y, op in self.letters[:MAX_LETTERS]:
            style = style_of(op)
            self.svg.text(x, y, style.letter, anchor="middle", size=11, color=style.ink)
        return self.svg.render()


def draw(rows: Sequence[Row], title: str) -> str:
    """An SVG document.

    Args:
        rows: from top to bottom; all of the same stretch of time.
        title: the picture's alternative text.
    """
    return _Picture(rows, title).render()
