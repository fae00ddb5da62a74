"""The consumers of one SM: they do its tasks in turn, with the stages of the ring as they land.

Their times run ahead of the loader's: what they do with a stage follows as soon as it is known when
the stage lands.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkref.simulate.core import Core
    from mkref.simulate.program import Work

__all__ = ["Consumers"]


class Consumers:
    """All eight warps, as one."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.begin = 0.0  # when the task was looked at
        self.at = 0.0  # how far the work on it is
        self.stage = 0  # of its stages, the next to take
        self.group = 0.0  # when the stages of a group that were seen so far had landed
        core.consumers = self

    def go(self) -> None:
        """As far as they can; room that they made is the loader's."""
        core = self.core
        while core.turn < len(core.turns):
            work = core.turns[core.turn]
            if not core.at_work:
                if work.holds:
                    core.hold_from, core.hold_until = self.begin, inf
                if core.turn >= len(core.given):
                    break
                self._begin(work, core.given[core.turn])
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
        core.at_work = True

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
        core = self.core
        work.end = end = self.at + work.shape.tail
        core.signal(work)
        if work.releases:
            core.place_free = end
        self.begin = end + core.costs.begin
        core.turn, core.at_work = core.turn + 1, False
        if core.turn == len(core.turns) or core.turns[core.turn].launch != work.launch:
            core.ended[work.launch] = end
            core.counters.arrive(core.program.end_key(work.launch), end)
        core.counters.wake += [core.waiter.go, core.helper.go]
