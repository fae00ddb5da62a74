"""Draws a layer of a plan: on top its graph with counters, below the lists of the SMs.

An operation is a box in its colour, a counter a white box that fills up with its arrivals. In the
lists a cell is a task: pale before its turn, framed when it can start, hatched while it waits, in
full colour when it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.plan.task import NO_COUNTER
from mkref.widgets.palette import GRID, INK, OUTLINE, WAIT, style_of
from mkref.widgets.plan.graph import ARRIVES, IN_TURN, ROUTES, WAITS, experts_through
from mkref.widgets.plan.model import ranges
from mkref.widgets.plan.progress import NOTHING
from mkref.widgets.svg import Svg, number, rect_path

if TYPE_CHECKING:
    from mkref.widgets.plan.graph import Arc, Node
    from mkref.widgets.plan.model import Cell, PlanView, Row

__all__ = ["PlanPicture"]

WIDTH, MARGIN = 900, 12
COLUMN, BOX, BOX_HEIGHT, INSET = 92, 68, 40, 4  # INSET: counters are smaller
GRAPH_TOP, GRAPH_ROW, ARCS = 62, 66, 46  # ARCS: room above the first row for long arcs
LEGEND = 26
CELL, CELL_HEIGHT, LIST_ROW, LIST_LEFT = 72, 24, 32, 116
PALE = "#f4f4f4"
DASHES = {ARRIVES: "", WAITS: "", ROUTES: "5 3", IN_TURN: "1.5 3"}
MAX_LINES = 40  # edges of the selected task


def middle(box: tuple[float, float, float, float]) -> tuple[float, float]:
    """Centre of x, y, width, height."""
    x, y, width, height = box
    return x + width / 2, y + height / 2


class PlanPicture:
    """The picture of one view.

    Attributes:
        svg: the document.
        regions: places that can be clicked: x, y, width, height and what they are: `task 12` or
            `sm 3`.
    """

    def __init__(self, view: PlanView, title: str) -> None:
        self.view = view
        self.regions: list[tuple[float, float, float, float, str]] = []
        self.cells: dict[int, tuple[float, float, float, float]] = {}
        self._names: list[tuple[float, float, str, str]] = []  # over the lines
        self.lists_top = GRAPH_TOP + ARCS + view.graph.n_rows * GRAPH_ROW + LEGEND
        height = self.lists_top + LIST_ROW * len(view.rows) + 44
        self._svg = Svg(WIDTH, height, title)
        self._head()
        self._graph()
        self._arc_legend()
        for i, row in enumerate(view.rows):
            self._list(row, self.lists_top + i * LIST_ROW)
        self._selected()
        for x, y, name, ink in self._names:
            self._svg.text(x, y, name, size=10, anchor="middle", color=ink)
        self._cell_legend(height - 24)
        self.svg = self._svg.render()

    def _head(self) -> None:
        view, last = self.view, self.view.progress.plan.config.num_hidden_layers
        name = (
            "after the last layer"
            if view.layer == last
            else f"layer {view.layer} (of 0 to {last - 1})"
        )
        self._svg.text(MARGIN, 26, name, size=18, bold=True)
        n = len(view.progress.tasks)
        mode = "computed by the interpreter" if view.computed else "counters only"
        said = f"{view.moment.n_done:,} of {n:,} tasks done ({mode})"
        self._svg.text(WIDTH - MARGIN, 24, said, anchor="end")
        width = (WIDTH - 2 * MARGIN) * view.moment.n_done / n
        self._svg.rect(MARGIN, 36, WIDTH - 2 * MARGIN, 6, "#ffffff", stroke=OUTLINE)
        self._svg.rect(MARGIN, 36, width, 6, INK)

    # the graph

    def _box(self, node: Node) -> tuple[float, float, float, float]:
        pitch = min(COLUMN, (WIDTH - 2 * MARGIN - BOX) / max(self.view.graph.n_columns - 1, 1))
        x = MARGIN + node.column * pitch
        y, inset = GRAPH_TOP + ARCS + node.row * GRAPH_ROW, INSET * node.is_counter
        return x, y + inset, BOX, BOX_HEIGHT - 2 * inset

    def _graph(self) -> None:
        for arc in self.view.graph.arcs:
            self._arc(arc)
        for node in self.view.graph.nodes:
            if node.is_counter:
                self._counter(node)
            else:
                self._operation(node)

    def _arc(self, arc: Arc) -> None:
        """A line; one that skips columns of its row goes over them."""
        a, b = self.view.graph.nodes[arc.begin], self.view.graph.nodes[arc.end]
        (xa, ya, width, height), (xb, yb, _, tall) = self._box(a), self._box(b)
        between = range(a.column + 1, b.column)
        skips = any(n.row == b.row and n.column in between for n in self.view.graph.nodes)
        if skips and b.row == min(a.row, b.row):
            # From the upper edge of one box to that of the other, the longer the higher.
            lift = 14 + 5 * len(between)
            x1, y1, x2, y2 = xa + width * 0.7, ya, xb + width * 0.3, yb
            curve = [(x1, y1 - lift), (x2, y2 - lift), (x2, y2)]
            down = True
        else:
            x1, y1, x2, y2 = xa + width, ya + height / 2, xb, yb + tall / 2
            bend = (x2 - x1) / 2
            curve = [(x1 + bend, y1), (x2 - bend, y2), (x2, y2)]
            down = False
        points = " ".join(f"{number(x)} {number(y)}" for x, y in curve)
        data = f"M{number(x1)} {number(y1)}C{points}"
        self._svg.path(data, "none", stroke=INK, width=1.2, dash=DASHES[arc.kind])
        tip = "l-3.5 -7h7z" if down else "l-7 -3.5v7z"
        self._svg.path(f"M{number(x2)} {number(y2)}{tip}", INK)

    def _operation(self, node: Node) -> None:
        view, (x, y, width, height) = self.view, self._box(node)
        style = style_of(node.name)
        done = sum(view.progress.is_done(view.moment, record) for record in node.records)
        self._svg.rect(
            x, y, width, height, self._svg.fill(style.fill, style.pattern), stroke=OUTLINE
        )
        # Patterns are for looking, not for reading over.
        if style.pattern != "plain":
            wide = 8 * len(node.name) + 4
            self._svg.rect(x + (width - wide) / 2, y + 4, wide, height - 8, style.fill)
        self._svg.text(
            x + width / 2, y + 17, node.name, size=10, anchor="middle", color=style.ink, bold=True
        )
        self._svg.text(
            x + width / 2, y + 32, f"{done}/{len(node.records)}", size=11, anchor="middle",
            color=style.ink,
        )  # fmt: skip

    def _counter(self, node: Node) -> None:
        view, (x, y, width, height) = self.view, self._box(node)
        have = view.moment.arrivals[node.counter]
        target = view.progress.plan.counters[node.counter].target
        self._svg.rect(x, y, width, height, "#ffffff", stroke=OUTLINE)
        full = width * have / max(target, 1)
        self._svg.rect(x, y + height - 6, full, 6, INK)
        self._svg.rect(x, y + height - 6, width, 6, "none", stroke=OUTLINE)
        self._svg.text(x + width / 2, y + 11, node.name, size=11, anchor="middle")
        self._svg.text(
            x + width / 2, y + 23, f"{have}/{target}", size=11, anchor="middle", bold=True
        )

    def _arc_legend(self) -> None:
        y = self.lists_top - 14
        kinds = {arc.kind for arc in self.view.graph.arcs}
        entries = [("solid: signals, waits for", "")]
        entries += [("dashed: finds its experts through", DASHES[ROUTES])] * (ROUTES in kinds)
        entries += [("dotted: comes before, on the same SM", DASHES[IN_TURN])] * (IN_TURN in kinds)
        for i, (name, dash) in enumerate(entries):
            x = MARGIN + i * 265
            self._svg.path(f"M{x} {y - 4}h26", "none", stroke=INK, width=1.2, dash=dash)
            self._svg.text(x + 32, y, name, size=11)

    # the lists

    def _list(self, row: Row, y: float) -> None:
        n = len(row.sms)
        name = f"SM {row.sms[0]}" if n == 1 else f"{n} SMs: {ranges(row.sms)}"
        if len(name) > 16:
            name = f"{n} SMs: {row.sms[0]} ..."
        self._svg.text(LIST_LEFT - 10, y + 16, name, anchor="end", size=11)
        if n == 1:
            self.regions.append((0, y, LIST_LEFT - 6, CELL_HEIGHT, f"sm {row.sms[0]}"))
        width = min(CELL, (WIDTH - LIST_LEFT - MARGIN) / max(len(row.cells), 1) - 4)
        for i, cell in enumerate(row.cells):
            box = (LIST_LEFT + i * (width + 4), y, width, CELL_HEIGHT)
            self._cell(cell, box)
            for record in cell.records:
                self.cells[record] = box
            self.regions.append((*box, f"task {cell.records[0]}"))
        if n == 1:
            x = LIST_LEFT + len(row.cells) * (width + 4) + 8
            self._svg.text(x, y + 16, self._short_state(row.sms[0]), size=11)

    def _short_state(self, sm: int) -> str:
        """What fits beside the cells."""
        view = self.view
        record = view.progress.next_of(view.moment, sm)
        if record == NOTHING:
            return "done"
        lack = view.progress.lack(view.moment, record)
        if lack is None:
            return "can go on"
        if lack.counter == NO_COUNTER:
            return "experts' place is taken"
        return f"waits: {view.counter(lack.counter)} {lack.have}/{lack.want}"

    def _cell(self, cell: Cell, box: tuple[float, float, float, float]) -> None:
        x, y, width, height = box
        style, n = style_of(cell.op), len(cell.records)
        self._svg.rect(*box, PALE, stroke=GRID)
        if cell.n_done:
            fill = self._svg.fill(style.fill, style.pattern)
            self._svg.rect(x, y, width * cell.n_done / n, height, fill, stroke=OUTLINE)
        if cell.n_waiting:
            hatch = self._svg.fill("#ffffff", "diagonal", WAIT)
            begin = width * cell.n_done / n
            self._svg.rect(x + begin, y, width * cell.n_waiting / n, height, hatch, stroke=OUTLINE)
        if cell.n_ready:
            self._svg.path(rect_path(*box), "none", stroke=INK, width=2.5)
        name = cell.op if n == 1 else f"{style.letter} {cell.n_done}/{n}"
        done = cell.n_done == n
        if cell.n_waiting or (cell.n_done and style.pattern != "plain") or 0 < cell.n_done < n:
            plate = style.fill if done else "#ffffff"
            wide = min(6.9 * len(name) + 4, width - 4)
            self._svg.rect(x + (width - wide) / 2, y + 5, wide, height - 10, plate)
        ink = style.ink if done else INK
        self._names.append((x + width / 2, y + 16, name, ink))

    def _selected(self) -> None:
        """Frame the task; solid lines from those that it waits for, dashed ones to its own."""
        view, record = self.view, self.view.selected
        if record == NOTHING or record not in self.cells:
            return
        task, progress = view.progress.tasks[record], view.progress
        counters = (task.wait, experts_through(task))
        needs = [r for c in counters for r in progress.signals.get(c, [])]
        waiting = progress.waiting.get(task.signal, []) if task.signal != NO_COUNTER else []
        for others, dash in ((needs, ""), (waiting, "4 3")):
            boxes = list(dict.fromkeys(self.cells[r] for r in others if r in self.cells))
            for box in boxes[:MAX_LINES]:
                ends = (box, self.cells[record]) if others is needs else (self.cells[record], box)
                self._line(*ends, dash)
        self._double(*self.cells[record])

    def _double(self, x: float, y: float, width: float, height: float) -> None:
        """Two frames around a box: selected."""
        for air in (2.5, 5):
            box = rect_path(x - air, y - air, width + 2 * air, height + 2 * air)
            self._svg.path(box, "none", stroke=INK, width=1.2)

    def _line(
        self, a: tuple[float, float, float, float], b: tuple[float, float, float, float], dash: str
    ) -> None:
        # Low in the cells, where it does not go through names.
        (xa, ya, wa, ha), (xb, yb, _, hb) = a, b
        data = f"M{number(xa + wa)} {number(ya + ha - 4)}L{number(xb)} {number(yb + hb - 4)}"
        self._svg.path(data, "none", stroke="#ffffff", width=3.5)
        self._svg.path(data, "none", stroke=INK, width=1.5, dash=dash)

    def _cell_legend(self, y: float) -> None:
        hatch = self._svg.fill("#ffffff", "diagonal", WAIT)
        entries = (
            (PALE, GRID, 0.5, "not yet its turn"),
            (PALE, INK, 2.5, "can start"),
            (hatch, OUTLINE, 0.5, "waits"),
            (style_of("QKV").fill, OUTLINE, 0.5, "done"),
        )
        for i, (fill, stroke, width, name) in enumerate(entries):
            x = LIST_LEFT + i * 140
            self._svg.path(rect_path(x, y, 22, 14), fill, stroke=stroke, width=width)
            self._svg.text(x + 30, y + 11, name, size=11)
        x = LIST_LEFT + len(entries) * 140
        self._svg.rect(x, y, 22, 14, PALE, stroke=GRID)
        self._double(x, y, 22, 14)
        self._svg.text(x + 34, y + 11, "selected", size=11)
