"""Which tasks surely come before which: a run of the plan with vector clocks.

Every SM walks its list; a task starts when its counters have all their arrivals. A clock has one
number per SM: how many tasks of its list are known to be finished. The run is done in one order
that respects the counters; since every wait asks for all arrivals of its counter (which
`mkref.plan.checks` has made sure of), what a task knows when it starts is the same in every order.

The loader is a second walker per SM. It stops only where it needs experts: at the first task of a
layer that uses them it waits for `route_wait`, and for the task that released the last ones.

What it does not do: judge the order (`mkref.plan.hazards`).

Source: Mattern, "Virtual time and global states of distributed systems" (1989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mkref.errors import PlanError
from mkref.plan.effects import ROUTED
from mkref.plan.task import NO_COUNTER

if TYPE_CHECKING:
    from mkref.plan.table import Ints, TaskTable

__all__ = ["Clocks", "run_clocks"]

Clock = npt.NDArray[np.int32]

SHOWN = 4
"""Links of a circle of waits that the error names."""


@dataclass(frozen=True)
class Clocks:
    """What is known to be finished when a task starts.

    Attributes:
        start: int32 [n_tasks, n_sm], for the consumers.
        loader: int32 [len(finders), n_sm], for the loader when it reads the router logits.
        finders: records at which a loader finds experts, ascending.
    """

    start: Clock
    loader: Clock
    finders: Ints


class _Run:
    """The state of the run: per SM a position and two clocks, per counter arrivals and a clock."""

    def __init__(self, table: TaskTable) -> None:
        n_sm, n_counters = table.plan.n_sm, len(table.plan.counters)
        self.table = table
        self.finders = _finders(table)
        self.is_finder = np.zeros(len(table), dtype=bool)
        self.is_finder[self.finders] = True
        self.start = np.zeros((len(table), n_sm), dtype=np.int32)
        self.found: dict[int, Clock] = {}
        self.at = table.offsets[:-1].tolist()
        self.end = table.offsets[1:].tolist()
        self.clock = np.zeros((n_sm, n_sm), dtype=np.int32)
        self.loader = np.zeros((n_sm, n_sm), dtype=np.int32)
        self.arrived = [0] * n_counters
        self.signalled = np.zeros((n_counters, n_sm), dtype=np.int32)
        # Per counter: SMs that sleep until so many have arrived.
        self.sleepers: list[dict[int, list[int]]] = [{} for _ in range(n_counters)]
        # Plain lists: the run looks at one word at a time.
        names = ("wait", "wait_count", "route_wait", "route_count", "signal")
        self.words = {name: table[name].tolist() for name in names}
        self.routed = np.isin(table["op"], list(ROUTED)).tolist()

    def blocked_by(self, record: int) -> tuple[int, int] | None:
        """A counter and the arrivals that the record still lacks."""
        pairs = [("wait", "wait_count")]
        if self.is_finder[record]:
            pairs.insert(0, ("route_wait", "route_count"))
        for wait, count in pairs:
            counter = self.words[wait][record]
            if counter != NO_COUNTER and self.arrived[counter] < self.words[count][record]:
                return counter, self.words[count][record]
        return None

    def advance(self, sm: int) -> list[int]:
        """Run one SM until it is blocked or done; SMs that it woke."""
        woken: list[int] = []
        clock, loader = self.clock[sm], self.loader[sm]
        first = int(self.table.offsets[sm])
        while self.at[sm] < self.end[sm]:
            record = self.at[sm]
            lack = self.blocked_by(record)
            if lack is not None:
                counter, want = lack
                self.sleepers[counter].setdefault(want, []).append(sm)
                break
            if self.is_finder[record]:
                route = self.words["route_wait"][record]
                if route != NO_COUNTER:
                    np.maximum(loader, self.signalled[route], out=loader)
                self.found[record] = loader.copy()
            if self.routed[record]:
                np.maximum(clock, loader, out=clock)
            wait = self.words["wait"][record]
            if wait != NO_COUNTER:
                np.maximum(clock, self.signalled[wait], out=clock)
            self.start[record] = clock
            clock[sm] = record - first + 1
            if self.routed[record]:
                # The next experts come after the release of these; earlier is no harm.
                np.maximum(loader, clock, out=loader)
            signal = self.words["signal"][record]
            if signal != NO_COUNTER:
                self.arrived[signal] += 1
                np.maximum(self.signalled[signal], clock, out=self.signalled[signal])
                woken += self.sleepers[signal].pop(self.arrived[signal], [])
            self.at[sm] = record + 1
        return woken


def _finders(table: TaskTable) -> Ints:
    """The first record of each run of routed tasks of one layer, per SM."""
    routed = np.flatnonzero(np.isin(table["op"], list(ROUTED)))
    sm, layer = table.sm[routed], table["layer"][routed]
    first = np.ones(len(routed), dtype=bool)
    first[1:] = (sm[1:] != sm[:-1]) | (layer[1:] != layer[:-1])
    return routed[first]


def run_clocks(table: TaskTable) -> Clocks:
    """Run the plan once.

    Raises:
        PlanError: it cannot finish, some SMs wait for each other; names the circle.
    """
    run = _Run(table)
    awake = list(range(table.plan.n_sm))
    while awake:
        awake += run.advance(awake.pop())
    for sm in range(table.plan.n_sm):
        if run.at[sm] < run.end[sm]:
            raise PlanError(f"plan: {_cycle(run, sm)}")
    found = [run.found[record] for record in run.finders.tolist()]
    loader = np.array(found, dtype=np.int32).reshape(len(found), table.plan.n_sm)
    return Clocks(run.start, loader, run.finders)


def _cycle(run: _Run, sm: int) -> str:
    """Who waits for whom, followed from one SM until it repeats: only the circle itself."""
    seen: list[int] = []
    links: list[str] = []
    while sm not in seen:
        record = run.at[sm]
        lack = run.blocked_by(record)
        assert lack is not None, "an SM stops only where something lacks"
        counter, want = lack
        signals = np.flatnonzero(run.table["signal"] == counter)
        ahead = signals[run.table.at[signals] >= _positions(run)[run.table.sm[signals]]]
        seen.append(sm)
        links.append(
            f"{run.table.place(record)} waits for ever: {run.table.counter(counter)} gets "
            f"{run.arrived[counter]} of {want} arrivals, the next from {run.table.place(ahead[0])}"
        )
        sm = int(run.table.sm[ahead[0]])
    circle = links[seen.index(sm) :]
    more = [f"and {len(circle) - SHOWN} more"] if len(circle) > SHOWN else []
    return "; ".join([*circle[:SHOWN], *more])


def _positions(run: _Run) -> Ints:
    """Where every SM stopped in its list."""
    return np.array(run.at) - run.table.offsets[:-1]
