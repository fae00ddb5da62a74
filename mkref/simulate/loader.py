"""The loader of one SM: it asks for stages as long as the ring has room for them.

Like the kernel's it walks the same list as the consumers, waits for the experts where the bytes
depend on them, and limits what is in flight, more so while the consumers wait for others. It acts
through the agenda, so copies of all SMs reach the memory in the order of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.plan.effects import ROUTED
from mkref.plan.task import Op

if TYPE_CHECKING:
    from mkref.simulate.agenda import Agenda
    from mkref.simulate.core import Core
    from mkref.simulate.memory import Memory
    from mkref.simulate.program import Work
    from mkref.simulate.switches import Switches

__all__ = ["Loader"]

ON_OTHERS = (Op.ATTENTION, *ROUTED)
"""Copies of these depend on what others wrote, so a launch that begins early waits with them."""


class Loader:
    """The loader of one SM."""

    def __init__(
        self, sm: int, core: Core, memory: Memory, agenda: Agenda, switches: Switches,
        most: tuple[int, int],
    ) -> None:  # fmt: skip
        self.sm, self.core, self.memory, self.agenda = sm, core, memory, agenda
        self.run_ahead = switches.run_ahead
        self.most, self.most_waiting = most
        self.works = [work for work in core.works if work.shape.stages]
        turns = {id(work): turn for turn, work in enumerate(core.turns)}
        self.turns = [turns[id(work)] for work in self.works]
        self.stamp = 0.0 if switches.traced else core.costs.stamp
        mine = sorted({work.launch for work in core.turns})
        self.before = dict(zip(mine[1:], mine, strict=False))  # launches of this SM
        self.next = self.stage = 0
        self.at = -1e9  # when the last copy was asked for
        self.scheduled = False
        core.loader = self

    def go(self) -> None:
        """Enter the next copy into the agenda, if it is known when it can be asked for."""
        if self.scheduled or self.next >= len(self.works):
            return
        core, costs, work = self.core, self.core.costs, self.works[self.next]
        slots = len(core.landed)
        if core.issued - core.returned >= slots:
            return
        if self.stage:
            at = self.at + costs.after_issue - self.stamp
        else:
            begins = self._begins(work)
            if begins is None:
                return
            at = begins
        if core.issued >= slots:
            free = core.released[core.issued % slots] + costs.after_release
            if free > at:
                at = free
        self.scheduled = True
        if core.at_work and core.turns[core.turn] is work:
            # The consumers will not wait for others before they have this stage.
            room = self._room(self.most)
            self.agenda.add(at if at > room else room, self.issue)
        else:
            self.agenda.add(at, self.look)

    def _begins(self, work: Work) -> float | None:
        """When the loader can begin with a task."""
        core, costs = self.core, self.core.costs
        routed = work.task.op in ROUTED
        at = max(self.at + costs.next_task, 0.0)
        opens = self._opens(work)
        if opens is None:
            return None
        at = max(at, opens)
        if routed:
            known = core.experts_at.get((work.part, work.task.layer))
            if known is None:
                return None
            at = max(at, known + costs.after_land)
        if not self.run_ahead:
            given, turn = core.given, self.turns[self.next]
            if turn >= len(given):
                return None
            at = max(at, given[turn] + costs.after_land)
        return at

    def _opens(self, work: Work) -> float | None:
        """When the task's launch has begun for the loader."""
        core, launch = self.core, work.launch
        if not launch or core.program.follows[launch] != "dependent" or work.task.op in ON_OTHERS:
            return core.launched(work, self.go)
        before = self.before.get(launch, -1)
        ended = core.ended.get(before, None if before >= 0 else 0.0)
        return None if ended is None else ended + core.costs.launch["early"]

    def _room(self, most: int) -> float:
        """When fewer than `most` copies are in flight, as the loader sees it."""
        core = self.core
        if core.issued < most:
            return 0.0
        landed = core.landed[(core.issued - most) % len(core.landed)]
        return landed + core.costs.after_land - self.stamp

    def look(self, at: float) -> None:
        """Ask for the copy now, or when there is room in flight."""
        core = self.core
        holds_back = core.hold_from <= at < core.hold_until
        room = self._room(self.most_waiting if holds_back else self.most)
        if room > at:
            self.agenda.add(room, self.issue)
        else:
            self.issue(at)

    def issue(self, at: float) -> None:
        """Ask for a copy; the consumers go on with it."""
        core, work = self.core, self.works[self.next]
        stages = work.shape.stages
        landed = self.memory.copy(self.sm, at, stages[self.stage].n_bytes)
        core.landed[core.issued % len(core.landed)] = landed
        core.issued += 1
        if core.stamps is not None:
            core.stamps.append([at, landed, -1.0, -1.0])
        self.at, self.scheduled = at, False
        self.stage += 1
        if self.stage == len(stages):
            work.issued = at
            self.next, self.stage = self.next + 1, 0
        if core.at_work:
            core.consumers.go()
        else:
            self.go()
