"""A walk through a step of a plan: forward one task, back, to the end; in turns or at random.

Going back shows an earlier moment again; going on from there shows the same moments as before.
With an interpreter every task is computed when it is reached for the first time.

What it does not do: draw.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mkref.widgets.plan.progress import NOTHING, Progress, Snapshot

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["PlanWalk", "Works"]


KEPT = 128
"""Every so many tasks a moment is kept; those between are found again from the order."""


class Works(Protocol):
    """Does tasks, one after another: `mkref.plan.walk.Walk`."""

    def advance(self, sm: int) -> None:
        """Do the next task of an SM."""

    def tokens(self) -> tuple[int, ...]:
        """What the step has drawn, once it is over."""


class PlanWalk:
    """The order in which SMs have done their tasks so far, and a place in it.

    Args:
        plan: to walk through.
        works: computes the tasks; None: only counters move.
        seed: of the random order.

    Attributes:
        progress: answers questions about moments.
        order: the SM that went, task after task.
        at: how many of them the moment that is shown comes after.
        moment: that moment.
        random_order: who goes next is drawn; else SMs take turns.
    """

    def __init__(self, plan: Plan, works: Works | None = None, *, seed: int = 0) -> None:
        self.progress = Progress(plan)
        self.works = works
        self.random_order = False
        self._random = random.Random(seed)
        self.order: list[int] = []
        self.at = 0
        self.moment = self.progress.start()
        self._kept = {0: self.moment}

    @property
    def is_stuck(self) -> bool:
        """Nobody can go on, and not all is done."""
        over = self.progress.is_over(self.moment)
        return not over and not self.progress.can_go(self.moment)

    def forward(self, sm: int | None = None) -> bool:
        """One task on.

        Args:
            sm: who goes; None: the next moment again if there is one, else whoever's turn it is.
                An SM that is named starts another future, unless it is the one that went. With an
                interpreter there is one future only: what is computed is computed.

        Returns:
            Whether anything moved: not if that SM waits, or nobody can go on.
        """
        if self.at < len(self.order):
            went = self.order[self.at]
            if self.works is not None or sm is None or sm == went:
                self._go(went)
                return True
            if sm not in self.progress.can_go(self.moment):
                return False
            del self.order[self.at :]
            self._kept = {n: moment for n, moment in self._kept.items() if n <= self.at}
        chosen = self._next() if sm is None else sm
        if chosen is None or not self.progress.is_able(self.moment, chosen):
            return False
        if self.works is not None:
            self.works.advance(chosen)
        self.order.append(chosen)
        self._go(chosen)
        return True

    def _go(self, sm: int) -> None:
        self.moment = self.progress.after(self.moment, sm)
        self.at += 1
        if self.at % KEPT == 0:
            self._kept[self.at] = self.moment

    def _next(self) -> int | None:
        """Who can go on: the first after the one that went last, or the first that is drawn."""
        n = self.progress.plan.n_sm
        last = self.moment.last
        first = 0 if last == NOTHING else self.progress.sm_of[last] + 1
        sms = [(first + i) % n for i in range(n)]
        if self.random_order:
            self._random.shuffle(sms)
        return next((sm for sm in sms if self.progress.is_able(self.moment, sm)), None)

    def back(self) -> bool:
        """One task back; False at the start."""
        if self.at == 0:
            return False
        target = self.at - 1
        self.at = target // KEPT * KEPT
        self.moment = self._kept[self.at]
        while self.at < target:
            self._go(self.order[self.at])
        return True

    def restart(self) -> None:
        """Back to the start, without forgetting."""
        self.at, self.moment = 0, self._kept[0]

    def run_until(self, reached: Callable[[Snapshot], bool]) -> None:
        """Go on until something is reached, or nobody can go on."""
        while not reached(self.moment) and self.forward():
            pass

    def run_layer(self, layer: int) -> None:
        """Go on until all tasks of a layer are done."""
        lasts = [records[-1] for records in self.progress.lists(layer) if records]
        self.run_until(lambda moment: all(self.progress.is_done(moment, r) for r in lasts))

    def run_all(self) -> None:
        """Go on to the end."""
        self.run_until(self.progress.is_over)
