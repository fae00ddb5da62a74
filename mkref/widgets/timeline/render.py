"""The timeline without a kernel: picture, sentences and table, of one run or of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.trace.path import describe_path, totals
from mkref.trace.summary import by_op, describe, format_ns
from mkref.widgets.figure import Figure, Table
from mkref.widgets.timeline.compare import LETTERS, describe_pair, label_of, signed
from mkref.widgets.timeline.edges import NOBODY, Edges, describe_edges
from mkref.widgets.timeline.picture import DIGIT, Row, draw, ticks

if TYPE_CHECKING:
    from mkref.trace.events import Trace
    from mkref.widgets.timeline.compare import Pair
    from mkref.widgets.timeline.model import Timeline

__all__ = ["DIGIT", "figure", "figure_of_pair", "headline", "pair_table", "path_table", "ticks"]


def headline(trace: Trace, title: str = "") -> str:
    """The sentence about the whole step; the live view, which shows all of it, says no more."""
    machine = title or trace.where
    label = label_of(trace)
    head = f"{machine} [{label}]: " if machine else f"[{label}] "
    return f"{head}{describe(trace)}"


def summary(view: Timeline, title: str) -> str:
    """The sentences under the picture: the step, and which part of it is drawn."""
    parts = [headline(view.trace, title)]
    if view.path:
        parts.append(describe_path(view.trace))
    if view.selected != NOBODY:
        parts.append(_selected(view.edges, view.selected))
    return " ".join([*parts, view.scope])


def _selected(edges: Edges, task: int) -> str:
    event = edges.trace.event(task)
    return (
        f"Selected: {event.op} of layer {event.layer} on SM {event.sm}. "
        f"{describe_edges(edges, task)}"
    )


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


def path_table(edges: Edges) -> Table:
    """Work and hand-overs on the critical path, the largest first."""
    span = max(edges.trace.span_ns, 1)
    kinds = zip(("work", "hand-over"), totals(edges.trace, edges.path), strict=True)
    rows = [(kind, row) for kind, found in kinds for row in found]
    return Table(
        ("on the critical path", "kind", "times", "time", "share of the step", "longest"),
        tuple(
            (
                row.name, kind, str(row.n), format_ns(row.ns), f"{row.ns / span:.1%}",
                format_ns(row.longest_ns),
            )
            for kind, row in sorted(rows, key=lambda each: -each[1].ns)
        ),
    )  # fmt: skip


def pair_table(a: Trace, b: Trace) -> Table:
    """Work and wait per operation in both runs, added over all SMs, and the change."""
    rows = [{row.op: row for row in by_op(trace)} for trace in (a, b)]
    cells = []
    for op in dict.fromkeys([*rows[0], *rows[1]]):
        found = [each.get(op) for each in rows]
        work = [row.work_ns if row else 0 for row in found]
        wait = [row.wait_ns if row else 0 for row in found]
        columns = [[*map(format_ns, both), signed(both[1], both[0])] for both in (work, wait)]
        cells.append((op, *columns[0], *columns[1]))
    spans = (a.span_ns, b.span_ns)
    cells.append(("whole step", *map(format_ns, spans), signed(spans[1], spans[0]), "", "", ""))
    heads = [*(f"work {run}" for run in LETTERS), "change"]
    heads += [*(f"wait {run}" for run in LETTERS), "change"]
    return Table(("operation", *heads), tuple(cells))


def figure(view: Timeline, title: str = "") -> Figure:
    """Picture, sentence and table.

    Args:
        view: what to show.
        title: first words of the sentence; default: the machine in the trace's provenance.
    """
    said = summary(view, title)
    rows = [Row(view, sm, f"SM {sm}") for sm in view.sms]
    return Figure(draw(rows, said), said, table(view))


def figure_of_pair(both: Pair, titles: tuple[str, str] = ("", "")) -> Figure:
    """Picture with a row per SM and run, the first over the second; sentences; a table of both.

    Args:
        both: what to show.
        titles: names of the runs; default: the machines in their provenance.
    """
    parts = [describe_pair(*both.traces, titles)]
    for letter, view in zip(LETTERS, (both.a, both.b), strict=True):
        if view.path:
            parts.append(f"{letter}: {describe_path(view.trace)}")
        if view.selected != NOBODY:
            parts.append(f"{letter}: {_selected(view.edges, view.selected)}")
    said = " ".join([*parts, both.a.scope])
    rows = [
        Row(view, sm, f"SM {sm} {letter}", gap=view is both.b)
        for sm in both.a.sms
        for letter, view in zip(LETTERS, (both.a, both.b), strict=True)
    ]
    return Figure(draw(rows, said), said, pair_table(*both.traces))
