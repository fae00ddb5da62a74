"""The helper and the waiter of one SM, which wait for what other SMs do.

As in the kernel they stand beside the consumers: the helper finds the experts of a layer as soon as
its router's logits are complete, and with many rows does MERGE; the waiter knows when the inputs of
the next few tasks are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.plan.task import Flag

if TYPE_CHECKING:
    from mkref.simulate.core import Core
    from mkref.simulate.program import Work

__all__ = ["Helper", "Waiter"]

TASK_SLOTS = 4
"""Records that the waiter may be ahead, as in the kernel."""


class Helper:
    """Finds the experts of each layer; with many rows it also does MERGE."""

    def __init__(self, core: Core, rows: int) -> None:
        self.core = core
        self.todo = [work for work in core.works if work.finds or work.beside]
        self.next, self.at, self.launch = 0, 0.0, 0
        self.rows = rows
        core.helper = self

    def go(self) -> None:
        """As far as it can."""
        core, costs, full_at = self.core, self.core.costs, self.core.counters.full_at
        while self.next < len(self.todo):
            work = self.todo[self.next]
            opens = core.launched(work, self.go)
            if opens is None:
                return
            if work.launch != self.launch:
                self.launch, core.place_free = work.launch, opens  # nobody holds it
            if work.finds:
                if core.place_free is None:
                    return
                full = full_at(work.router, self.go)
                if full is None:
                    return
                begin = max(self.at, opens, core.place_free, full)
                dense = work.task.flags & Flag.DENSE
                find = costs.dense if dense else costs.find + costs.find_row * (self.rows - 1)
                self.at = core.experts_at[work.part, work.task.layer] = begin + find
                core.place_free = None
                core.counters.wake += [core.waiter.go, core.loader.go]
            elif work.beside:
                full = full_at(work.wait, self.go)
                if full is None:
                    return
                work.begin = max(self.at, opens)
                work.ready = max(work.begin + costs.ready, full)
                work.end = self.at = work.ready + work.shape.head
                core.signal(work)
                if self._is_last(work):
                    core.counters.arrive(core.program.end_key(work.launch), self.at)
            self.next += 1

    def _is_last(self, work: Work) -> bool:
        """The last that runs beside, of its launch."""
        later = (each for each in self.todo[self.next + 1 :] if each.beside)
        return next((each.launch != work.launch for each in later), True)


class Waiter:
    """Knows when each record's inputs are there, up to `TASK_SLOTS` records ahead."""

    def __init__(self, core: Core) -> None:
        self.core, self.at = core, 0.0
        core.waiter = self

    def go(self) -> None:
        """As far as it can."""
        core, given, turns = self.core, self.core.given, self.core.turns
        while len(given) < len(turns) and len(given) < core.turn + TASK_SLOTS:
            work = turns[len(given)]
            opens = core.launched(work, self.go)
            if opens is None:
                return
            at = max(self.at, opens)
            if len(given) >= TASK_SLOTS:
                at = max(at, turns[len(given) - TASK_SLOTS].end)
            if work.finds:
                known = core.experts_at.get((work.part, work.task.layer))
                if known is None:
                    return
                at = max(at, known)
            full = core.counters.full_at(work.wait, self.go)
            if full is None:
                return
            self.at = max(at, full)
            given.append(self.at)
            core.counters.wake += [core.consumers.go, core.loader.go]
