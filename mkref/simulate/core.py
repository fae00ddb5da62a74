"""One SM: what its warps share, and the consumers.

Each kind of warp is a small object; `go` runs until it needs something whose time is not known yet,
and is called again when that is known. Times of the consumers run ahead of the loader's: what they
do with a stage follows as soon as it is known when the stage lands.

What it does not do: ask for copies (`mkref.simulate.loader`), find experts or wait for counters
(`mkref.simulate.warps`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from mkref.plan.task import Op
from mkref.simulate.counters import NOTHING
from mkref.simulate.warps import Helper, Waiter

if TYPE_CHECKING:
    from mkref.simulate.agenda import Agenda
    from mkref.simulate.costs import Costs
    from mkref.simulate.counters import Counters
    from mkref.simulate.loader import Loader
    from mkref.simulate.memory import Memory
    from mkref.simulate.program import Program, Work

__all__ = ["Core"]


class Core:
    """What the warps of one SM share.

    Attributes:
        works: its list; `turns` is without what the helper does.
        landed, released: ns of the stage in each slot of the ring.
        issued, taken, returned: stages so far.
        experts_at: for each part and layer when the experts are known.
        hold_from, hold_until: the latest wait during which the loader holds back.
        ended: for each launch when this SM's consumers had ended it.
        stamps: times of every stage, if they are wanted: issued, landed, taken, released.
    """

    def __init__(
        self, works: list[Work], stages: int, costs: Costs, counters: Counters, program: Program,
        rows: int, agenda: Agenda, memory: Memory,
    ) -> None:  # fmt: skip
        self.works, self.costs, self.counters, self.program = works, costs, counters, program
        self.agenda, self.memory = agenda, memory
        self.turns = [work for work in works if not work.beside]
        self.landed, self.released = [0.0] * stages, [0.0] * stages
        self.issued = self.taken = self.returned = 0
        self.experts_at: dict[tuple[int, int], float] = {}
        self.hold_from, self.hold_until = inf, -inf
        self.ended: dict[int, float] = {}
        self.stamps: list[list[float]] | None = None
        self.helper, self.waiter, self.consumers = Helper(self, rows), Waiter(self), Consumers(self)
        self.loader: Loader

    def start(self) -> None:
        """Let everybody go."""
        for go in (self.helper.go, self.waiter.go, self.consumers.go, self.loader.go):
            self.counters.wake.append(go)

    def launched(self, work: Work, then: Callable[[], None]) -> float | None:
        """When a task's launch has begun; None if that is not known yet: `then` will be called."""
        if not work.launch:
            return 0.0
        full = self.counters.full_at(self.program.end_key(work.launch - 1), then)
        return None if full is None else full + self.costs.launch[self.program.follows[work.launch]]

    def signal(self, work: Work) -> None:
        """The signaller: after a task's end its outputs become visible, then others learn of it."""
        if work.signal == NOTHING:
            return
        costs, key, early = self.costs, work.signal, work.announces
        per_byte = costs.hop_load[Op(work.task.op).name]

        def arrive(at: float) -> None:
            # What is in flight is in the way: of the stores, of the signal and of the poll.
            flying = self.memory.in_flight(at)
            self.counters.arrive(key, at + costs.hop + per_byte * flying)
            if early != NOTHING:
                self.counters.arrive(early, at + costs.announced + costs.announced_load * flying)

        self.agenda.add(work.end, arrive)


class Consumers:
    """Do the tasks in turn, with the stages as they land."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.next = 0  # of core.turns
        self.begin = 0.0  # when that one was looked at
        self.at = -1.0  # how far the work on it is; below 0: not begun
        self.stage = 0  # of its stages, the next to take
        self.group = 0.0  # when the stages of a group that were seen so far had landed

    def go(self) -> None:
        """As far as they can; room that they made is the loader's."""
        core, given = self.core, self.core.waiter.given
        while self.next < len(core.turns):
            work = core.turns[self.next]
            if self.at < 0:
                if work.holds:
                    core.hold_from, core.hold_until = self.begin, inf
                if self.next >= len(given):
                    break
                self._begin(work, given[self.next])
            if not self._take(work):
                break
            self._end(work)
        core.loader.go()

    def _begin(self, work: Work, given: float) -> None:
        core = self.core
        work.begin = max(self.begin, core.launched(work, self.go) or 0.0)
        work.ready = max(work.begin + core.costs.ready, given)
        if work.holds:
            core.hold_until = work.ready
        self.at, self.stage = work.ready + work.shape.head, 0

    def _take(self, work: Work) -> bool:
        """Take what stages are on their way; False if some are not."""
        core, stages, released = self.core, work.shape.stages, self.core.released
        slots, issued, taken = len(released), core.issued, core.taken
        at, number = self.at, self.stage
        while number < len(stages) and taken < issued:
            _, lead, service, group = stages[number]
            slot = taken % slots
            landed = core.landed[slot]
            at += lead
            if group != 1 and landed < self.group:
                landed = self.group
            if group:
                if landed > at:
                    at = landed
                at += service
                for back in range(group):
                    released[slot - back] = at
                core.returned += group
                self.group = 0.0
            else:
                self.group = landed
            if core.stamps is not None:
                for back in range(group):
                    core.stamps[taken - back][2:] = (at - service, at)
            taken += 1
            number += 1
        core.taken, self.at, self.stage = taken, at, number
        return number == len(stages)

    def _end(self, work: Work) -> None:
        core, costs = self.core, self.core.costs
        work.end = end = self.at + work.shape.tail
        core.signal(work)
        if work.releases:
            core.helper.free = end
        self.begin, self.at = end + costs.begin, -1.0
        self.next += 1
        wake = core.counters.wake
        if self.next == len(core.turns) or core.turns[self.next].launch != work.launch:
            core.ended[work.launch] = end
            core.counters.arrive(core.program.end_key(work.launch), end)
        wake += [core.waiter.go, core.helper.go]
