"""Who waits for whom in a trace: what each task waited for, what held it up, and who waits for it.

The rule is that of the critical path (`mkref.trace.path`): a task needs the tasks that signal its
counter, experts need the layer's router as well, and everybody waits for its turn. What came last
of all these is its cause; causes, followed from the task that ended last, are the critical path.

What it does not do: know a plan that did not run. A trace carries the counters of its plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mkref.plan.task import NO_COUNTER, Op
from mkref.trace.events import END, READY, Trace
from mkref.trace.path import ROUTED, Link, critical_path
from mkref.trace.summary import format_ns

__all__ = ["NOBODY", "Edges", "describe_edges"]

NOBODY = -1
ROUTER = Op.ROUTER.name


@dataclass(frozen=True, eq=False)
class Edges:
    """The dependencies of every task of one trace; tasks are their numbers in it."""

    trace: Trace

    @cached_property
    def is_routed(self) -> np.ndarray:
        """bool [n_tasks]: needs the experts of its layer."""
        return self._is_op(*ROUTED)

    @cached_property
    def is_router(self) -> np.ndarray:
        """bool [n_tasks]: helps to find the experts of its layer."""
        return self._is_op(ROUTER)

    def _is_op(self, *names: str) -> np.ndarray:
        numbers = [k for k, op in enumerate(self.trace.ops) if op in names]
        return np.isin(self.trace.columns["op"], numbers) & self.trace.complete

    @cached_property
    def before(self) -> np.ndarray:
        """int64 [n_tasks]: the task before it in the list that it ran in; `NOBODY` for the first.

        What ran beside the others of its SM has a list of its own.
        """
        before = np.full(self.trace.n_tasks, NOBODY)
        for lane in (~self.trace.beside, self.trace.beside):
            tasks = np.flatnonzero(self.trace.complete & lane)
            sm = self.trace.columns["sm"][tasks]
            same = sm[1:] == sm[:-1]
            before[tasks[1:][same]] = tasks[:-1][same]
        return before

    @cached_property
    def cause(self) -> np.ndarray:
        """int64 [n_tasks]: what came last of all that it needed; `NOBODY` if it needed nothing."""
        trace, column = self.trace, self.trace.columns
        end = np.append(trace.times[:, END], NOBODY)  # that of NOBODY, so that an index may be it
        signals = trace.complete & (column["signal"] != NO_COUNTER)
        last = self._last(column["signal"], signals, len(trace.counters))
        found = last[column["wait"]]
        found[column["wait"] == NO_COUNTER] = NOBODY
        n_layers = int(column["layer"].max(initial=0)) + 1
        routers = self._last(column["layer"], self.is_router, n_layers)[column["layer"]]
        later = self.is_routed & (end[routers] > end[found])
        found = np.where(later, routers, found)
        in_turn = (self.before != NOBODY) & (end[self.before] >= end[found])
        return np.where(trace.complete, np.where(in_turn, self.before, found), NOBODY)

    def _last(self, keys: np.ndarray, chosen: np.ndarray, n_keys: int) -> np.ndarray:
        """Per key the chosen task that ended last; of several, the one with the lowest number."""
        last = np.full(max(n_keys, 1), NOBODY)
        tasks = np.flatnonzero(chosen)
        order = tasks[np.lexsort((-tasks, self.trace.times[tasks, END]))]
        last[keys[order]] = order  # later ones overwrite
        return last

    def waits_for(self, task: int) -> list[int]:
        """The tasks whose arrivals it needed, in the order in which they ended."""
        column = self.trace.columns
        needed = np.zeros(self.trace.n_tasks, dtype=bool)
        if column["wait"][task] != NO_COUNTER:
            needed |= column["signal"] == column["wait"][task]
        if self.is_routed[task]:
            needed |= self.is_router & (column["layer"] == column["layer"][task])
        return self._sorted(needed, END)

    def needed_by(self, task: int) -> list[int]:
        """The tasks that wait for its arrival, in the order in which they could start."""
        column = self.trace.columns
        waiting = np.zeros(self.trace.n_tasks, dtype=bool)
        if column["signal"][task] != NO_COUNTER:
            waiting |= column["wait"] == column["signal"][task]
        if self.is_router[task]:
            waiting |= self.is_routed & (column["layer"] == column["layer"][task])
        return self._sorted(waiting, READY)

    def _sorted(self, chosen: np.ndarray, time: int) -> list[int]:
        tasks = np.flatnonzero(chosen & self.trace.complete)
        order = np.argsort(self.trace.times[tasks, time], kind="stable")
        return [int(task) for task in tasks[order]]

    @cached_property
    def path(self) -> list[Link]:
        """The critical path."""
        return critical_path(self.trace)


def _place(edges: Edges, task: int, time: int) -> str:
    event = edges.trace.event(task)
    return f"{event.op} on SM {event.sm}, at {format_ns(edges.trace.times[task, time])}"


def _counted(edges: Edges, tasks: Iterable[int]) -> str:
    """`4 QKV, 8 ROUTER`: operations in the order of a step."""
    ops = Counter(int(edges.trace.columns["op"][task]) for task in tasks)
    return ", ".join(f"{n} {edges.trace.ops[op]}" for op, n in sorted(ops.items()))


def describe_edges(edges: Edges, task: int) -> str:
    """What a task waited for, what held it up, and who waits for it. The browser says the same.

    Raises:
        IndexError: no such task.
    """
    needed, waiting = edges.waits_for(task), edges.needed_by(task)
    cause, before = int(edges.cause[task]), int(edges.before[task])
    parts = ["It waited for no other task."]
    if needed:
        last = _place(edges, needed[-1], END)
        parts = [f"It waited for {_counted(edges, needed)}; the last was {last}."]
    if cause == NOBODY:
        parts.append("Nothing held it up.")
    elif cause == before:
        parts.append(f"Held up by its turn: {_place(edges, cause, END)}.")
    else:
        parts.append(f"Held up by {_place(edges, cause, END)}.")
    if waiting:
        parts.append(
            f"Waiting for it: {_counted(edges, waiting)}; the first to start was "
            f"{_place(edges, waiting[0], READY)}."
        )
    else:
        parts.append("No other SM waits for it.")
    return " ".join(parts)
