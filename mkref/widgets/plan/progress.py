"""How far a step of a plan has come: tasks done per SM, arrivals per counter, who waits for whom.

A `Snapshot` is a moment; everything else follows from it and the plan. The rules are those of the
kernel: an SM goes through its list in order, a task starts when its counter is full, experts need
the counter of their router as well, and the place for experts must be free.

What it does not do: compute activations, or overlap anything: one task at a time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mkref.plan.effects import ROUTED
from mkref.plan.task import NO_COUNTER, Flag, Op
from mkref.widgets.plan.graph import LayerGraph, experts_through, layer_graph

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.plan.task import Task

__all__ = ["NOTHING", "Lack", "Progress", "Snapshot"]

NOTHING = -1
"""In place of a task, a layer or an SM: none."""


@dataclass(frozen=True)
class Snapshot:
    """A moment of a step.

    Attributes:
        done: tasks that each SM has done.
        arrivals: of this step, per counter.
        last: the task that was done last, its number in the plan; `NOTHING` at the start.
    """

    done: tuple[int, ...]
    arrivals: tuple[int, ...]
    last: int = NOTHING

    @property
    def n_done(self) -> int:
        """Tasks done by all SMs."""
        return sum(self.done)


@dataclass(frozen=True)
class Lack:
    """What a task cannot start without.

    Attributes:
        counter: that is not full; `NO_COUNTER`: the place of the experts of `layer` was never
            given back.
        have, want: arrivals.
        experts: the counter is that of the router.
        layer: whose experts are in the way.
    """

    counter: int
    have: int
    want: int
    experts: bool = False
    layer: int = NOTHING


@dataclass(frozen=True, eq=False)
class Progress:
    """Answers questions about moments of one plan; tasks are their numbers in it."""

    plan: Plan

    @cached_property
    def tasks(self) -> list[Task]:
        """All tasks, SM after SM."""
        return [task for _, _, task in self.plan]

    @cached_property
    def offsets(self) -> list[int]:
        """First task of each SM, and one past the last."""
        return [int(n) for n in self.plan.offsets()]

    @cached_property
    def sm_of(self) -> list[int]:
        """The SM of each task."""
        return [sm for sm, _, _ in self.plan]

    @cached_property
    def signals(self) -> dict[int, list[int]]:
        """Per counter the tasks that signal it."""
        found: dict[int, list[int]] = defaultdict(list)
        for record, task in enumerate(self.tasks):
            if task.signal != NO_COUNTER:
                found[task.signal].append(record)
        return found

    @cached_property
    def waiting(self) -> dict[int, list[int]]:
        """Per counter the tasks that wait for it, or whose experts do."""
        found: dict[int, list[int]] = defaultdict(list)
        for record, task in enumerate(self.tasks):
            for counter in {task.wait, experts_through(task)} - {NO_COUNTER}:
                found[counter].append(record)
        return found

    @cached_property
    def _by_layer(self) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        for record, (sm, _, task) in enumerate(self.plan):
            mine = found.setdefault(task.layer, [[] for _ in range(self.plan.n_sm)])
            mine[sm].append(record)
        return found

    def lists(self, layer: int) -> list[list[int]]:
        """Per SM its tasks of one layer."""
        return self._by_layer.get(layer, [[] for _ in range(self.plan.n_sm)])

    def graph(self, layer: int) -> LayerGraph:
        """A layer as a graph, which no moment changes.

        Raises:
            RequestError: no such layer.
        """
        if layer not in self._graphs:
            self._graphs[layer] = layer_graph(self.plan, layer)
        return self._graphs[layer]

    @cached_property
    def _graphs(self) -> dict[int, LayerGraph]:
        return {}

    def start(self) -> Snapshot:
        """Nothing is done yet."""
        return Snapshot((0,) * self.plan.n_sm, (0,) * len(self.plan.counters))

    def next_of(self, moment: Snapshot, sm: int) -> int:
        """The task that an SM is at; `NOTHING` if it is through."""
        record = self.offsets[sm] + moment.done[sm]
        return record if record < self.offsets[sm + 1] else NOTHING

    def is_done(self, moment: Snapshot, record: int) -> bool:
        """Whether a task is over."""
        sm = self.sm_of[record]
        return record < self.offsets[sm] + moment.done[sm]

    def is_over(self, moment: Snapshot) -> bool:
        """Whether all tasks are."""
        return moment.n_done == len(self.tasks)

    def lack(self, moment: Snapshot, record: int) -> Lack | None:
        """What a task lacks besides its turn."""
        task = self.tasks[record]
        if task.op in ROUTED:
            kept = self._kept(record)
            if kept != NOTHING:
                return Lack(NO_COUNTER, 0, 1, experts=True, layer=kept)
            short = self._short(moment, task.route_wait, task.route_count, experts=True)
            if short is not None:
                return short
        return self._short(moment, task.wait, task.wait_count, experts=False)

    @staticmethod
    def _short(moment: Snapshot, counter: int, want: int, *, experts: bool) -> Lack | None:
        if counter == NO_COUNTER or moment.arrivals[counter] >= want:
            return None
        return Lack(counter, moment.arrivals[counter], want, experts)

    def _kept(self, record: int) -> int:
        """The layer whose experts the SM's list never gave back before this task."""
        task = self.tasks[record]
        for before in range(record - 1, self.offsets[self.sm_of[record]] - 1, -1):
            earlier = self.tasks[before]
            if earlier.op in ROUTED and earlier.layer != task.layer:
                return NOTHING if earlier.flags & Flag.RELEASE else earlier.layer
        return NOTHING

    def can_go(self, moment: Snapshot) -> list[int]:
        """SMs whose next task lacks nothing."""
        return [sm for sm in range(self.plan.n_sm) if self.is_able(moment, sm)]

    def is_able(self, moment: Snapshot, sm: int) -> bool:
        """Whether an SM can go on: its next task lacks nothing."""
        record = self.next_of(moment, sm)
        return record != NOTHING and self.lack(moment, record) is None

    def after(self, moment: Snapshot, sm: int) -> Snapshot:
        """The moment after an SM has done its next task, which must not lack anything."""
        record = self.next_of(moment, sm)
        done, arrivals = [*moment.done], [*moment.arrivals]
        done[sm] += 1
        signal = self.tasks[record].signal
        if signal != NO_COUNTER:
            arrivals[signal] += 1
        return Snapshot(tuple(done), tuple(arrivals), record)

    def missing(self, moment: Snapshot, counter: int) -> list[int]:
        """Tasks whose arrivals a counter still lacks."""
        return [r for r in self.signals[counter] if not self.is_done(moment, r)]

    def name(self, record: int) -> str:
        """`QKV of layer 1 on SM 2`."""
        task = self.tasks[record]
        op = Op(task.op).name if task.op in set(Op) else f"opcode {task.op}"
        return f"{op} of layer {task.layer} on SM {self.sm_of[record]}"
