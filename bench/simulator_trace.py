"""What a trace with stages says about the times of single things, for the simulator's table.

Every stage of the ring is put beside the task that it belongs to. From the stamps on both follow
the times of taking a stage, between stages and row blocks, before the first and after the last, of
hand-overs between SMs, of the loader: means or medians over all SMs whose stages were recorded. Of
what can wait, only what did not have to wait counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.effects import ROUTED
from mkref.plan.task import Flag, Op
from mkref.trace.events import BEGIN, END, READY
from mkref.trace.stages import ABSENT

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.simulate.work import Shapes
    from mkref.trace.events import Trace

__all__ = ["Statistics", "hop_times"]

ISSUED, LANDED, TAKEN, RELEASED = range(4)
WAITED_NS = 300
"""A task that was seen so long before its inputs were there has waited for them."""
LONGEST_NS = 2500
"""A copy is on its way for at most so long; the stamp of its landing may come later."""


def hop_times(trace: Trace, op: Op, may_miss: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """For each counter that `op` signals: ns from the last end, or that after which only one in
    `may_miss` are missing, until those who waited were ready, median; and when that end was."""
    begin, ready, end = trace.times[:, [BEGIN, READY, END]].T
    waits, signals, ops = (trace.columns[name] for name in ("wait", "signal", "op"))
    waited = (ready - begin > WAITED_NS) & (ops != Op.HEAD)
    waited &= ~np.isin(ops, ROUTED) | (ops == Op.DOWN)  # others wait for the experts
    hops, ends = [], []
    for counter in np.unique(signals[(ops == op) & (trace.columns["layer"] > 0)]):
        late = waited & (waits == counter)
        if counter >= 0 and late.any():
            mine = np.sort(end[signals == counter])
            ends.append(int(mine[-1 - (len(mine) // may_miss if may_miss else 0)]))
            hops.append(float(np.median(ready[late] - ends[-1])))
    return np.array(hops), np.array(ends)


class Statistics:
    """Times of a recorded step.

    Args:
        trace: with stages.
        plan: that was run.
        shapes: of its tasks in the same situation.
    """

    def __init__(self, trace: Trace, plan: Plan, shapes: Shapes) -> None:
        assert trace.stages is not None, "the trace has no stages"
        self.trace, self.stages = trace, trace.stages
        self.tasks = [task for _, _, task in plan]
        self.op, self.layer = trace.columns["op"], trace.columns["layer"]
        self.begin, self.ready, self.end = trace.times[:, [BEGIN, READY, END]].T
        self._join(shapes)
        seen = np.where(self.times[:, LANDED] == ABSENT, 10**12, self.times[:, LANDED])
        self.seen, self.landed = seen, np.minimum(seen, self.times[:, TAKEN])
        self.asked_for = np.sort(self.times[:, ISSUED])
        self.there = np.sort(np.minimum(self.landed, self.times[:, ISSUED] + LONGEST_NS))

    def _join(self, shapes: Shapes) -> None:
        """For every stage: its task, its number in it, how many there are, whether a row block
        begins with it; its times."""
        rows: list[tuple[int, int, int, bool]] = []
        times = []
        for sm in self.stages.sms:
            times.append(self.stages.times[self.stages.sm == sm])
            before = len(rows)
            for number in self.trace.tasks_of(sm).tolist():
                task = self.tasks[number]
                n = len(shapes.of(task, normed=False).stages)
                block = max(task.k_tiles // shapes.ring.stage_tiles, 1)
                if task.op == Op.DOWN and n:
                    block = n // task.count
                rows += [(number, i, n, i % block == 0) for i in range(n)]
            if len(rows) - before != len(times[-1]):
                raise SystemExit(f"SM {sm}: the stages recorded are not those of this plan")
        self.task, self.number, self.of, self.new_block = np.array(rows).T
        self.times = np.concatenate(times)

    def tasks_of(self, op: Op) -> np.ndarray:
        """bool [tasks]: of an operation, layer 0 left out, whose shapes are others."""
        first = 0 if op == Op.EMBED else 1
        return np.asarray((self.op == op) & self.trace.complete & (self.layer >= first))

    def work(self, chosen: np.ndarray) -> float:
        """Median work of some tasks."""
        return float(np.median((self.end - self.ready)[chosen]))

    def between(self) -> float:
        """From the end of a task until the next of the SM is seen."""
        same = np.diff(self.trace.columns["sm"]) == 0
        return float(np.median((self.begin[1:] - self.end[:-1])[same]))

    def at_once(self) -> float:
        """From seeing a task whose inputs are there until it begins."""
        wait = self.ready - self.begin
        return float(np.median(wait[wait < WAITED_NS]))

    def of_op(self, op: Op) -> np.ndarray:
        """bool [stages]: of the tasks of an operation."""
        return np.asarray(self.tasks_of(op)[self.task])

    def head(self, op: Op) -> float:
        """From the inputs until the first stage is taken, where it had landed before."""
        chosen = self.of_op(op) & (self.number == 0) & (self.landed < self.ready[self.task])
        return float(np.median((self.times[:, TAKEN] - self.ready[self.task])[chosen]))

    def tail(self, op: Op) -> float:
        """From giving the last stage back until the end."""
        chosen = self.of_op(op) & (self.number == self.of - 1)
        return float(np.mean((self.end[self.task] - self.times[:, RELEASED])[chosen]))

    def stage(self, op: Op) -> float:
        """From taking a stage until it is given back."""
        return float(np.mean((self.times[:, RELEASED] - self.times[:, TAKEN])[self.of_op(op)]))

    def slow_tile(self) -> float:
        """A tile of the slow path: DOWN of the dense layer, whose experts are too wide for the
        fast one; eight warps share a stage of 64 tiles."""
        chosen = (self.op[self.task] == Op.DOWN) & (self.layer[self.task] == 0)
        return float(np.mean((self.times[:, RELEASED] - self.times[:, TAKEN])[chosen])) / 8

    def gap(self, op: Op, *, new_block: bool) -> float:
        """From giving a stage back until the next is taken, where that had landed before."""
        released = np.roll(self.times[:, RELEASED], 1)
        chosen = self.of_op(op) & (self.number > 0) & (self.new_block == new_block)
        chosen &= self.landed < released - 100
        return float(np.mean((self.times[:, TAKEN] - released)[chosen]))

    def asks_after(self, what: str) -> float:
        """From what the loader waited for until it asked for a copy: the copy two before has
        "landed", as it saw itself; a slot was "released"; nothing, after the last "copy"; or after
        the last "task".
        """
        issued, ring = self.times[:, ISSUED], self.stages.ring.stages
        landed, released = np.roll(self.seen, 2), np.roll(self.times[:, RELEASED], ring)
        before = np.roll(issued, 1)
        free = (landed < before) & (released < before)
        late = before + 1200
        chosen, since = {
            "landed": ((landed > late) & (landed > released + WAITED_NS), landed),
            "released": ((released > late) & (released > landed + WAITED_NS), released),
            "copy": (free & self.of_op(Op.GATE_UP) & (self.number > 0), before),
            "task": (free & self.of_op(Op.ATTENTION) & (self.number == 0), before),
        }[what]
        return float(np.median((issued - since)[chosen & (issued > since)]))

    def in_flight(self, at: np.ndarray) -> np.ndarray:
        """Bytes in flight per recorded SM, mean from 0.5 us before until 1 us after each time."""
        n = [
            np.searchsorted(self.asked_for, at + d) - np.searchsorted(self.there, at + d)
            for d in (-500, 0, 500, 1000)
        ]
        return np.asarray(np.mean(n, axis=0) / len(self.stages.sms) * self.stages.ring.stage_bytes)

    def route(self) -> tuple[float, float]:
        """From the end of a layer's last ROUTER until the first copy that depends on it, median;
        and bytes in flight at that end, mean."""
        found, ends = [], []
        for k in np.flatnonzero(self.of_op(Op.GATE_UP) & (self.number == 0)):
            task = self.tasks[self.task[k]]
            if task.first % 2 == 0 and not task.flags & Flag.DENSE:
                ends.append(
                    int(self.end[self.tasks_of(Op.ROUTER) & (self.layer == task.layer)].max())
                )
                found.append(float(self.times[k, ISSUED] - ends[-1]))
        return float(np.median(found)), float(self.in_flight(np.array(ends)).mean())
