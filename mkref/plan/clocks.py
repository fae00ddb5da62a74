"""Which tasks surely come before which: runs of the plan with vector clocks.

Three walk along each SM's list, step after step: the consumers; the helper, which finds the experts
of each layer and, with many rows, does MERGE (the table says who does what); and the loader. A task
starts when its counter has all its arrivals. A clock has one number per lane, consumers and helpers
(`mkref.plan.table`): how many of its tasks are known to be finished, counted from the beginning of
the step; -3 says that the last three of the step before may still be running. A run is done in one
order that respects the counters; since every wait asks for all arrivals of its counter (which
`mkref.plan.checks` has made sure of), what a task knows when it starts is the same in every order.

    consumers   the warps of an SM come to a task one by one, some may still be at the one before.
                So they know of themselves, too, only what counters tell. They signal when all warps
                have finished a task, and with it all before it; all begin a step together.
    helper      one warp. It waits for the consumers' release of the last experts, they wait for it
                at the first task that needs the next.
    loader      learns what the helper knew when it announced the experts of the layer: it finds
                them in logits that tell by themselves that they are there, and only then waits for
                the router's counter, so that is the counter of the routed layer before. And at an
                ATTENTION task with a `route_wait`, that counter in the step before. From free
                stages of the ring, nothing is concluded.

Tasks that read x early (`mkref.plan.effects.EARLY`) wait for its writers, and learn nothing.

A launch begins with everything before it finished. That is the most a step can begin with, and more
knowledge at the beginning is more knowledge everywhere: from step to step it can only shrink. So
the plan is run until a step begins as the one before it did. All later steps are like that one, and
all earlier ones know as much or more: what holds in the last run holds in every step. Of
the steps two and more before, knowledge is not kept; nobody reads what they wrote.

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
from mkref.plan.task import NO_COUNTER, Op

if TYPE_CHECKING:
    from mkref.plan.table import Ints, TaskTable

__all__ = ["Clocks", "run_clocks"]

Clock = npt.NDArray[np.int32]

SHOWN = 4
"""Links of a circle of waits that the error names."""
PARTNER = (-1, 0)
"""Lacks no arrival, but the consumers or the helper of the same SM."""


@dataclass(frozen=True)
class Clocks:
    """What is known to be finished when a task starts, in any step.

    Attributes:
        start: int32 [n_tasks, 2 n_sm], for whoever works on it.
        loader: int32 [len(readers), 2 n_sm], for the loader when it reads what tasks have written.
        readers: records at which a loader uses experts or copies KV pages, ascending.
        steps: runs until a step began as the one before it.
    """

    start: Clock
    loader: Clock
    readers: Ints
    steps: int


class _Run:
    """The state of the runs: per lane a position and a clock, per counter arrivals and a clock."""

    def __init__(self, table: TaskTable) -> None:
        self.table, self.n_sm = table, table.plan.n_sm
        n_lanes, n_counters = 2 * self.n_sm, len(table.plan.counters)
        self.lengths = table.lengths.astype(np.int32)
        finders, releases = _finders(table)
        self.releases = dict(zip(finders.tolist(), releases.tolist(), strict=True))
        helped = table.by_helper()
        finds = helped.copy()
        finds[finders] = True
        # What every lane comes to: the helper also to the tasks for which it finds experts.
        self.lists = [
            records.tolist()
            for mine in (~helped, finds)
            for records in np.split(np.flatnonzero(mine), _bounds(table.sm[mine], self.n_sm))
        ]
        reads = (table["op"] == Op.ATTENTION) | (finds & ~helped)
        self.readers = np.flatnonzero(reads)
        self.start = np.zeros((len(table), n_lanes), dtype=np.int32)
        self.loaded = np.zeros((len(self.readers), n_lanes), dtype=np.int32)
        self.clock = np.zeros((n_lanes, n_lanes), dtype=np.int32)
        self.loader = np.zeros((self.n_sm, n_lanes), dtype=np.int32)
        # What all arrivals of a counter tell: those of the step before, and of this one so far.
        self.before = np.zeros((n_counters, n_lanes), dtype=np.int32)
        # Plain lists: the run looks at one word at a time.
        names = ("wait", "wait_count", "route_wait", "route_count", "signal")
        self.words = {name: table[name].tolist() for name in names}
        self.turn = table.turn.tolist()
        self.early = table.reads_early(np.arange(len(table))).tolist()

    def knowledge(self) -> Clock:
        """What is known at the beginning of a step, in one array."""
        return np.concatenate([self.clock, self.loader, self.before])

    def begin(self) -> None:
        """Back to the beginning of every list; nothing has been signalled."""
        n_counters = len(self.before)
        self.at = [0] * len(self.lists)
        # What counters tell the consumers about themselves; the step before is over.
        self.own = [0] * self.n_sm
        self.arrived = [0] * n_counters
        self.signalled = np.tile(-self.lengths, (n_counters, 1))
        # Per counter: lanes that sleep until so many have arrived.
        self.sleepers: list[dict[int, list[int]]] = [{} for _ in range(n_counters)]
        self.naps = [False] * len(self.lists)  # until the partner goes on

    def finish(self) -> None:
        """What the loaders knew; then count from the end of the step, where the next one begins."""
        route_wait, sm = self.words["route_wait"], self.table.sm.tolist()
        # Of each helper, the router's counter that it has waited for last.
        routers = {sm[record]: (route_wait[record], self.before) for record in self.releases}
        for i, record in enumerate(self.readers.tolist()):
            route, told = route_wait[record], self.before
            if record in self.releases:
                (route, told), routers[sm[record]] = (
                    routers[sm[record]],
                    (route, self.signalled),
                )
            loader = self.loader[sm[record]]
            if route != NO_COUNTER:
                np.maximum(loader, told[route], out=loader)
            self.loaded[i] = loader
        self.clock, self.loader, self.before = (
            np.maximum(known, 0) - self.lengths
            for known in (self.clock, self.loader, self.signalled)
        )

    def partner(self, lane: int) -> int:
        """The helper of the same SM, or its consumers."""
        return (lane + self.n_sm) % len(self.lists)

    def passed(self, lane: int, record: int) -> bool:
        """Whether a lane has come past a record."""
        at, records = self.at[lane], self.lists[lane]
        return at == len(records) or records[at] > record

    def lack(self, lane: int) -> tuple[int, int] | None:
        """What the next record of a lane lacks: a counter and its arrivals, or its partner."""
        record = self.lists[lane][self.at[lane]]
        wait, count = "wait", "wait_count"
        if record in self.releases:
            at_helper = lane >= self.n_sm
            needs = self.releases[record] if at_helper else record
            if needs >= 0 and not self.passed(self.partner(lane), needs):
                return PARTNER
            if at_helper:
                wait, count = "route_wait", "route_count"
        counter, want = self.words[wait][record], self.words[count][record]
        return (counter, want) if counter != NO_COUNTER and self.arrived[counter] < want else None

    def learn(self, lane: int, counter: int) -> None:
        """A lane comes after what a counter tells."""
        if counter == NO_COUNTER:
            return
        told = self.signalled[counter]
        np.maximum(self.clock[lane], told, out=self.clock[lane])
        if lane < self.n_sm:
            self.own[lane] = max(self.own[lane], int(told[lane]))

    def advance(self, lane: int) -> list[int]:
        """Let one lane walk until it lacks something or is done; lanes that it woke."""
        woken: list[int] = []
        clock, partner = self.clock[lane], self.partner(lane)
        while self.at[lane] < len(self.lists[lane]):
            lack = self.lack(lane)
            if lack == PARTNER:
                self.naps[lane] = True
                break
            if lack is not None:
                self.sleepers[lack[0]].setdefault(lack[1], []).append(lane)
                break
            record = self.lists[lane][self.at[lane]]
            if record in self.releases:
                self.learn(lane, self.words["route_wait"][record])
            if lane < self.n_sm or record not in self.releases:
                woken += self.work(lane, record, clock)
            self.at[lane] += 1
            if self.naps[partner]:
                self.naps[partner] = False
                woken.append(partner)
        return woken

    def work(self, lane: int, record: int, clock: Clock) -> list[int]:
        """Do a task and signal; lanes that wake up."""
        if not self.early[record]:
            self.learn(lane, self.words["wait"][record])
        self.start[record] = clock
        if lane < self.n_sm:
            self.start[record, lane] = self.own[lane]
        clock[lane] = self.turn[record] + 1  # when it signals
        signal = self.words["signal"][record]
        if signal == NO_COUNTER:
            return []
        self.arrived[signal] += 1
        np.maximum(self.signalled[signal], clock, out=self.signalled[signal])
        return self.sleepers[signal].pop(self.arrived[signal], [])


def _bounds(sm: Ints, n_sm: int) -> Ints:
    """Where the records of SM 1, 2, ... begin among those of all SMs."""
    return np.searchsorted(sm, np.arange(1, n_sm))


def _finders(table: TaskTable) -> tuple[Ints, Ints]:
    """First records of the runs of routed tasks of one layer, per SM; last ones of the runs before.

    -1 where there is no run before in the step.
    """
    routed = np.flatnonzero(np.isin(table["op"], list(ROUTED)))
    sm, layer = table.sm[routed], table["layer"][routed]
    first = np.ones(len(routed), dtype=bool)
    first[1:] = (sm[1:] != sm[:-1]) | (layer[1:] != layer[:-1])
    at = np.flatnonzero(first)
    same = (at > 0) & (sm[at] == sm[at - 1])
    return routed[at], np.where(same, routed[at - 1], -1)


def run_clocks(table: TaskTable) -> Clocks:
    """Run the plan, step after step, until nothing changes any more.

    Raises:
        PlanError: it cannot finish, some SMs wait for each other; is the circle, in words.
    """
    run, steps = _Run(table), 0
    begun = None
    while begun is None or not np.array_equal(begun, run.knowledge()):
        begun, steps = run.knowledge(), steps + 1
        run.begin()
        awake = list(range(len(run.lists)))
        while awake:
            awake += run.advance(awake.pop())
        for lane, records in enumerate(run.lists):
            if run.at[lane] < len(records):
                raise PlanError(_cycle(run, lane))
        run.finish()
    return Clocks(run.start, run.loaded, run.readers, steps)


def _cycle(run: _Run, lane: int) -> str:
    """Who waits for whom, followed from one lane until it repeats: only the circle itself."""
    seen: list[int] = []
    links: list[str] = []
    while lane not in seen:
        seen.append(lane)
        record = run.lists[lane][run.at[lane]]
        lack = run.lack(lane)
        assert lack is not None, "a lane stops only where something lacks"
        place = run.table.place(record)
        if lack == PARTNER:
            what = "the place of" if lane >= run.n_sm else "the helper to find"
            links.append(f"{place} waits for ever for {what} its experts")
            lane = run.partner(lane)
            continue
        counter, want = lack
        signals = np.flatnonzero(run.table["signal"] == counter).tolist()
        ahead = next(r for r in signals if not run.passed(int(run.table.lane[r]), r))
        links.append(
            f"{place} waits for ever: {run.table.counter(counter)} gets "
            f"{run.arrived[counter]} of {want} arrivals, the next from {run.table.place(ahead)}"
        )
        lane = int(run.table.lane[ahead])
    circle = links[seen.index(lane) :]
    more = [f"and {len(circle) - SHOWN} more"] if len(circle) > SHOWN else []
    return "; ".join([*circle[:SHOWN], *more])
