"""One layer of a plan as a graph: its operations, the counters between them, who waits for whom.

All tasks of one operation are one node, whatever the number of SMs. A counter is a node between
those that signal it and those that wait for it. Tasks that signal nothing hand over to what follows
them in the list of their SM.

What it does not do: say where the nodes are drawn beyond column and row, or know a running step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

from mkref.errors import RequestError
from mkref.plan.effects import ROUTED
from mkref.plan.task import NO_COUNTER, Op

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.plan.task import Task

__all__ = ["ARRIVES", "IN_TURN", "ROUTES", "WAITS", "Arc", "LayerGraph", "Node", "layer_graph"]

Key = int | tuple[str, int]
"""An operation, or `("counter", index)`."""
ARRIVES, WAITS, ROUTES, IN_TURN = "arrives", "waits", "finds experts through", "goes before"
"""Kinds of arcs: an operation signals a counter; waits for one; its loader or helper waits for one;
an operation that signals nothing, and the next in the list."""


@dataclass(frozen=True)
class Node:
    """An operation or a counter.

    Attributes:
        name: of the operation or the counter.
        is_counter: which of both.
        records: of an operation, the numbers of its tasks in the plan.
        counter: of a counter, its index in the plan; else `NO_COUNTER`.
        column, row: where it stands: every arc leads to a higher column.
    """

    name: str
    is_counter: bool
    records: tuple[int, ...]
    counter: int
    column: int = 0
    row: int = 0


@dataclass(frozen=True)
class Arc:
    """From one node to another; indices into `LayerGraph.nodes`."""

    begin: int
    end: int
    kind: str


@dataclass(frozen=True)
class LayerGraph:
    """Nodes and arcs of one layer; layer L is what comes after the last: HEAD and SAMPLE."""

    layer: int
    nodes: tuple[Node, ...]
    arcs: tuple[Arc, ...]

    @property
    def n_columns(self) -> int:
        """Columns that nodes stand in."""
        return max((node.column for node in self.nodes), default=-1) + 1

    @property
    def n_rows(self) -> int:
        """Rows that nodes stand in."""
        return max((node.row for node in self.nodes), default=-1) + 1


def experts_through(task: Task) -> int:
    """The counter through which a task's experts are found, or `NO_COUNTER`.

    ATTENTION has the same word for a counter of the step before, which is full in this one.
    """
    return task.route_wait if task.op in ROUTED else NO_COUNTER


def layer_graph(plan: Plan, layer: int) -> LayerGraph:
    """The graph of one layer.

    Raises:
        RequestError: the plan has no task of this layer.
    """
    records: dict[int, list[int]] = defaultdict(list)
    arcs: dict[tuple[Key, Key], str] = {}
    tasks = [task for _, _, task in plan]
    for record, (sm, at, task) in enumerate(plan):
        if task.layer != layer:
            continue
        records[task.op].append(record)
        for counter, kind in ((task.wait, WAITS), (experts_through(task), ROUTES)):
            if counter != NO_COUNTER:
                arcs.setdefault((("counter", counter), task.op), kind)
        if task.signal != NO_COUNTER:
            arcs[task.op, ("counter", task.signal)] = ARRIVES
        elif at + 1 < len(plan.tasks[sm]) and tasks[record + 1].layer == layer:
            arcs[task.op, tasks[record + 1].op] = IN_TURN
    if not records:
        raise RequestError(
            f"layer: {layer} of a plan with layers 0 to {plan.config.num_hidden_layers}"
        )
    keys = _in_order({key for arc in arcs for key in arc} | records.keys())
    found = {key: i for i, key in enumerate(keys)}
    lines = [Arc(found[a], found[b], kind) for (a, b), kind in arcs.items() if a != b]
    lines.sort(key=lambda arc: (arc.begin, arc.end))
    columns = _columns(len(keys), lines)
    rows = _rows(columns, lines)
    nodes = []
    for i, key in enumerate(keys):
        if isinstance(key, tuple):
            name = plan.counters[key[1]].name
            nodes.append(Node(name, True, (), key[1], columns[i], rows[i]))
        else:
            name = _name(key)
            nodes.append(Node(name, False, tuple(records[key]), NO_COUNTER, columns[i], rows[i]))
    return LayerGraph(layer, tuple(nodes), tuple(lines))


def _name(op: int) -> str:
    return Op(op).name if op in set(Op) else f"opcode {op}"


def _in_order(keys: Iterable[Key]) -> list[Key]:
    """Counters by number, then operations in the order of a step."""
    keys = list(keys)
    counters = sorted(key for key in keys if isinstance(key, tuple))
    return [*counters, *sorted(key for key in keys if not isinstance(key, tuple))]


def _columns(n: int, arcs: list[Arc]) -> list[int]:
    """The longest way to each node; a damaged plan may go in circles: then all is in one column."""
    before: dict[int, set[int]] = {i: set() for i in range(n)}
    for arc in arcs:
        before[arc.end].add(arc.begin)
    columns = [0] * n
    try:
        order = [*TopologicalSorter(before).static_order()]
    except ValueError:  # CycleError
        return columns
    for i in order:
        columns[i] = max((columns[j] + 1 for j in before[i]), default=0)
    return columns


def _rows(columns: list[int], arcs: list[Arc]) -> list[int]:
    """A node stands in the row of the farthest that leads to it, or else in the next free one."""
    rows = [0] * len(columns)
    taken: set[tuple[int, int]] = set()
    for i in sorted(range(len(columns)), key=lambda i: (columns[i], i)):
        before = [arc.begin for arc in arcs if arc.end == i]
        rows[i] = rows[min(before, key=lambda j: (columns[j], j))] if before else 0
        while (columns[i], rows[i]) in taken:
            rows[i] += 1
        taken.add((columns[i], rows[i]))
    return rows
