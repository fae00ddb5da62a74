"""What the warps of one SM share, as they share its memory.

Each kind of warp is an object of its own: loader, consumers, helper, waiter. `go` of each runs
until it needs something whose time is not known yet, and is called again when that is known. The
signaller is `Core.signal`.

What it does not do: decide when anything happens on this SM.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Protocol

from mkref.plan.task import Op
from mkref.simulate.counters import NOTHING

if TYPE_CHECKING:
    from mkref.simulate.agenda import Agenda
    from mkref.simulate.costs import Costs
    from mkref.simulate.counters import Counters
    from mkref.simulate.memory import Memory
    from mkref.simulate.program import Program, Work

__all__ = ["Core"]


class Warp(Protocol):
    """One kind of warp."""

    def go(self) -> None:
        """Go as far as it can."""


class Core:
    """One SM.

    Attributes:
        works: its list; `turns` is without what the helper does.
        turn: of `turns`, the one that the consumers are at; `at_work`: they have begun it.
        given: of `turns`, when the waiter knew that the inputs were there.
        landed, released: ns of the stage in each slot of the ring.
        issued, taken, returned: stages so far.
        experts_at: for each part and layer when the experts are known.
        place_free: when the place of the experts is free again; None while they are in use.
        hold_from, hold_until: the latest wait during which the loader holds back.
        ended: for each launch when this SM's consumers had ended it.
        stamps: times of every stage, if they are wanted: issued, landed, taken, released.
    """

    def __init__(
        self, works: list[Work], stages: int, costs: Costs, counters: Counters, program: Program,
        agenda: Agenda, memory: Memory,
    ) -> None:  # fmt: skip
        self.works, self.costs, self.counters, self.program = works, costs, counters, program
        self.agenda, self.memory = agenda, memory
        self.turns = [work for work in works if not work.beside]
        self.landed, self.released = [0.0] * stages, [0.0] * stages
        self.issued = self.taken = self.returned = 0
        self.turn, self.at_work = 0, False
        self.given: list[float] = []
        self.place_free: float | None = 0.0
        self.experts_at: dict[tuple[int, int], float] = {}
        self.hold_from, self.hold_until = inf, -inf
        self.ended: dict[int, float] = {}
        self.stamps: list[list[float]] | None = None
        self.helper: Warp
        self.waiter: Warp
        self.consumers: Warp
        self.loader: Warp

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
                seen = at + costs.announced + costs.announced_load * flying
                self.counters.arrive(early, seen, not_before=at)

        self.agenda.add(work.end, arrive)
