"""The critical path of a step: the chain of tasks that made it as long as it is.

From the task that ended last it goes backwards. What a task was bound by is what came last of all
that it needed: a task that signals the counter it waits for, or the task before it in its own list.
The time between that and its start is the price of the hand-over: signal, poll, and whatever the
stamps do not see. Work and hand-overs on the path add up to the time of the step, so a saving
elsewhere saves nothing until the path has moved.

What it does not do: tell why work took its time (see `mkref.trace.ring` for the memory's side), or
say what would happen without a wait; then another chain would be the longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mkref.plan.task import NO_COUNTER
from mkref.trace.events import END, READY, Trace
from mkref.trace.summary import aligned, format_ns, n_sms

__all__ = ["Link", "OnPath", "critical_path", "describe_path", "path_report", "totals"]

NEXT, BESIDE, ACROSS = "in turn", "from beside", "from another SM"
ROUTED = ("GATE_UP", "DOWN")
"""Operations that also need the layer's experts, which the router's tasks decide."""


@dataclass(frozen=True)
class Link:
    """One task of the path.

    Attributes:
        task: its number in the trace.
        cause: number of the task that it was bound by, -1 for the first.
        how: how it depends on it: `NEXT`, `BESIDE` or `ACROSS`; "" for the first.
        wait_ns: from the end of the cause, or the start of the trace, until its inputs were ready.
        work_ns: from then until its end, or until the next of the path started, if that is earlier.
    """

    task: int
    cause: int
    how: str
    wait_ns: int
    work_ns: int


@dataclass(frozen=True)
class OnPath:
    """All links of one kind: how many, their time, the longest."""

    name: str
    n: int
    ns: int
    longest_ns: int


class _Causes:
    """Looks up what a task needs."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        done = trace.complete
        self.signals: dict[int, list[int]] = defaultdict(list)
        self.routers: dict[int, list[int]] = defaultdict(list)
        for i in np.flatnonzero(done):
            self.signals[int(trace.columns["signal"][i])].append(int(i))
            if trace.ops[trace.columns["op"][i]] == "ROUTER":
                self.routers[int(trace.columns["layer"][i])].append(int(i))
        # What runs beside has a list of its own on each SM.
        self.before: dict[int, int] = {}
        for lane in (~trace.beside, trace.beside):
            for a, b in pairwise(np.flatnonzero(done & lane)):
                if trace.columns["sm"][a] == trace.columns["sm"][b]:
                    self.before[int(b)] = int(a)

    def of(self, task: int) -> tuple[int, str]:
        """The one that came last, and how the task depends on it."""
        trace = self.trace
        column = {name: int(values[task]) for name, values in trace.columns.items()}
        needed: list[int] = []
        if column["wait"] != NO_COUNTER:
            needed += self.signals[column["wait"]]
        if trace.ops[column["op"]] in ROUTED:
            needed += self.routers[column["layer"]]
        before = self.before.get(task, -1)
        if not needed:
            return before, NEXT if before >= 0 else ""
        last = max(needed, key=lambda i: int(trace.times[i, END]))
        if before >= 0 and trace.times[before, END] >= trace.times[last, END]:
            return before, NEXT
        same = int(trace.columns["sm"][last]) == column["sm"]
        return last, ACROSS if not same else BESIDE


def critical_path(trace: Trace) -> list[Link]:
    """The path in the order of time.

    Returns:
        One link per task; `wait_ns` and `work_ns` of all add up to the end of the last task. Empty
        if no task was stamped.
    """
    done = np.flatnonzero(trace.complete)
    if not len(done):
        return []
    causes = _Causes(trace)
    task = int(done[trace.times[done, END].argmax()])
    until = int(trace.times[task, END])
    links: list[Link] = []
    while task >= 0:
        cause, how = causes.of(task)
        # Stamps are taken a moment after what they stamp, so a task may seem to start before.
        ready = min(int(trace.times[task, READY]), until)
        ended = min(int(trace.times[cause, END]), ready) if cause >= 0 else 0
        links.append(Link(task, cause, how, ready - ended, until - ready))
        task, until = cause, ended
    return links[::-1]


def _sums(named: Iterable[tuple[str, int]]) -> list[OnPath]:
    """Sums by name, the largest first."""
    times: dict[str, list[int]] = defaultdict(list)
    for name, ns in named:
        times[name].append(ns)
    rows = [OnPath(name, len(each), sum(each), max(each)) for name, each in times.items()]
    return sorted(rows, key=lambda row: (-row.ns, row.name))


def totals(trace: Trace, path: list[Link]) -> tuple[list[OnPath], list[OnPath]]:
    """Work per operation, and hand-overs per pair of operations, the largest first."""

    def op(task: int) -> str:
        return trace.ops[trace.columns["op"][task]]

    def named(link: Link) -> str:
        if link.cause < 0:
            return f"start -> {op(link.task)}"
        return f"{op(link.cause)} -> {op(link.task)} {link.how}"

    work = _sums((op(link.task), link.work_ns) for link in path)
    return work, _sums((named(link), link.wait_ns) for link in path)


def describe_path(trace: Trace) -> str:
    """One sentence."""
    path = critical_path(trace)
    if not path:
        return "Critical path: no task was stamped."
    work, waits = (sum(ns) for ns in zip(*((k.work_ns, k.wait_ns) for k in path), strict=True))
    sms = len({int(trace.columns["sm"][link.task]) for link in path})
    hops = sum(link.how == ACROSS for link in path)
    return (
        f"Critical path: {len(path):,} tasks on {n_sms(sms)}, {hops:,} hops between SMs, "
        f"{format_ns(work + waits)}: {work / max(work + waits, 1):.0%} of it work, "
        f"{waits / max(work + waits, 1):.0%} hand-overs."
    )


def path_report(trace: Trace) -> str:
    """The sentence, a table of the work and one of the hand-overs on the path."""
    path = critical_path(trace)
    span = max(sum(link.work_ns + link.wait_ns for link in path), 1)
    parts = [describe_path(trace)]
    heads = ("work on the path", "hand-overs on the path")
    for head, rows in zip(heads, totals(trace, path), strict=True):
        cells = [
            (
                row.name, str(row.n), format_ns(row.ns), f"{row.ns / span:.1%}",
                format_ns(row.ns / row.n), format_ns(row.longest_ns),
            )
            for row in rows
        ]  # fmt: skip
        parts.append(aligned([(head, "times", "time", "share", "mean", "longest"), *cells]))
    return "\n\n".join(parts)
