"""The rings without a kernel: bytes in flight of all, and a row per SM with what its ring holds.

In a row the height is the ring's stages: filled what has landed and waits to be used, hatched what
is still on its way, white what nobody has asked for. A strip under it shows when the consumers wait
for inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkref.trace.ring import describe_ring, kilobytes, ring_by_op
from mkref.trace.summary import format_ns
from mkref.widgets.figure import Figure, Table
from mkref.widgets.palette import GRID, OUTLINE, WAIT
from mkref.widgets.svg import Svg, number, rect_path
from mkref.widgets.timeline.render import DIGIT, ticks

if TYPE_CHECKING:
    from mkref.trace.events import Trace
    from mkref.widgets.ring.model import RingView

__all__ = ["figure", "headline"]

WIDTH, LEFT, RIGHT = 900, 74, 14
TOP, ALL, ROW, BAR, STRIP, AXIS = 52, 74, 50, 36, 5, 34
LANDED, FLYING = "#56B4E9", "#E69F00"
THINNEST = 0.4  # pixels: a wait that is shorter is not drawn


def headline(trace: Trace, title: str = "") -> str:
    """The sentence about the whole step."""
    machine = title or trace.where
    label = trace.provenance.get("label", "measured")
    head = f"{machine} [{label}]: " if machine else f"[{label}] "
    return f"{head}{describe_ring(trace)}"


def summary(view: RingView, title: str) -> str:
    """The sentences under the picture: the step, and which part of it is drawn."""
    return f"{headline(view.trace, title)} {view.scope}"


def table(trace: Trace) -> Table:
    """Ring and memory while the consumers wait for each operation, and while they do it."""

    def held(value: float) -> str:
        return "-" if np.isnan(value) else f"{value:.2f}"

    return Table(
        ("operation", "held, waiting", "in flight, waiting", "held, working", "in flight, working"),
        tuple(
            (
                row.op, held(row.held_waiting), kilobytes(row.in_flight_waiting),
                held(row.held_working), kilobytes(row.in_flight_working),
            )
            for row in ring_by_op(trace)
        ),
    )  # fmt: skip


def area(low: np.ndarray, high: np.ndarray, x: np.ndarray, bottom: float, scale: float) -> str:
    """Path data between two step curves, int or float [n], over edges `x` [n + 1]; cells of equal
    values become one step."""

    def steps(values: np.ndarray) -> list[tuple[float, float]]:
        y = np.round(bottom - values * scale, 1)
        change = np.flatnonzero(np.diff(y, prepend=np.nan) != 0)
        ends = [*x[change[1:]], x[-1]]
        return [
            point
            for k, end in zip(change, ends, strict=True)
            for point in ((x[k], y[k]), (end, y[k]))
        ]

    points = [*steps(high), *steps(low)[::-1]]
    return "M" + "L".join(f"{number(a)} {number(b)}" for a, b in points) + "z"


class _Picture:
    """Draws one view."""

    def __init__(self, view: RingView, title: str) -> None:
        self.view = view
        self.height = TOP + ALL + ROW * len(view.sms) + AXIS
        self.svg = Svg(WIDTH, self.height, summary(view, title))
        self.edges = self.x(view.edges)

    def x(self, ns: np.ndarray) -> np.ndarray:
        view = self.view
        share = (np.clip(ns, view.begin, view.end) - view.begin) / (view.end - view.begin)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def hatch(self) -> str:
        return self.svg.fill("#ffffff", "diagonal", WAIT)

    def flying(self) -> str:
        return self.svg.fill(FLYING, "vertical")

    def frame(self, top: float, height: float) -> None:
        self.svg.rect(LEFT, top, WIDTH - LEFT - RIGHT, height, "none", stroke=GRID)

    def legend(self) -> None:
        entries = (
            (self.flying(), "asked for, on the way"),
            (LANDED, "landed, not used up"),
            ("#ffffff", "free"),
            (self.hatch(), "consumers wait for inputs"),
        )
        for i, (fill, name) in enumerate(entries):
            x = LEFT + i * 205
            self.svg.rect(x, 14, 22, 15, fill, stroke=OUTLINE)
            self.svg.text(x + 28, 26, name)

    def axis(self) -> None:
        bottom = self.height - AXIS
        for tick in ticks(self.view.begin, self.view.end):
            x = float(self.x(np.array(tick)))
            self.svg.rect(x, TOP - 8, 0.5, bottom - TOP + 10, GRID)
            label = format_ns(tick)
            at = min(x, WIDTH - 2 - DIGIT / 2 * len(label))  # all of it on the page
            self.svg.text(at, bottom + 20, label, anchor="middle", size=11)

    def all_sms(self) -> None:
        """Bytes in flight of all together, against their maximum in this picture."""
        values, height = self.view.in_flight_of_all(), ALL - 16
        most = float(values.max(initial=0)) or 1.0
        data = area(np.zeros(len(values)), values, self.edges, TOP + height, height / most)
        self.frame(TOP, height)
        self.svg.path(data, self.flying(), stroke=OUTLINE)
        self.svg.text(LEFT - 8, TOP + 12, f"{most / 1e6:.2f} MB", anchor="end", size=11)
        count = len(self.view.stages.sms)
        self.svg.text(LEFT - 8, TOP + 30, f"{count} SM{'' if count == 1 else 's'}", anchor="end")

    def lane(self, sm: int, top: float) -> None:
        view, scale = self.view, BAR / self.view.stages.ring.stages
        held, flying = view.held(sm), view.in_flight(sm)
        self.frame(top, BAR)
        nothing = np.zeros(len(held))
        # What has landed lies below, what is on the way above it.
        landed = np.maximum(held - flying, 0)
        self.svg.path(area(nothing, landed, self.edges, top + BAR, scale), LANDED)
        self.svg.path(area(landed, held, self.edges, top + BAR, scale), self.flying())
        waits = [(self.x(np.array(a)), self.x(np.array(b))) for a, b in view.waits(sm)]
        shown = [
            rect_path(float(a), top + BAR + 2, float(b - a), STRIP)
            for a, b in waits
            if b - a >= THINNEST
        ]
        if shown:
            self.svg.path("".join(shown), self.hatch(), stroke=WAIT)
        self.svg.text(LEFT - 8, top + 22, f"SM {sm}", anchor="end")

    def render(self) -> str:
        self.legend()
        self.axis()
        self.all_sms()
        for row, sm in enumerate(self.view.sms):
            self.lane(sm, TOP + ALL + row * ROW)
        return self.svg.render()


def figure(view: RingView, title: str = "") -> Figure:
    """Picture, sentence and table.

    Args:
        view: what to show.
        title: first words of the sentence; default: the machine in the trace's provenance.
    """
    picture = _Picture(view, title).render()
    return Figure(picture, summary(view, title), table(view.trace), fits=True)
