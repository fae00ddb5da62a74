"""What is simulated, SM by SM: the tasks of one or more plans one after another.

A part is a plan and how it follows the part before: in the same launch, or in a launch of its own.
A step in several launches has a part for each. A step in the middle of a long launch has two: the
end of the step before, so that the rings are as full as they are then, and the step itself.

What it does not do: time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mkref.plan.effects import ROUTED
from mkref.plan.task import NO_COUNTER, Flag, Op
from mkref.simulate.counters import NOTHING
from mkref.simulate.work import OF_X

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.plan.task import Task
    from mkref.simulate.switches import Switches
    from mkref.simulate.work import Shape, Shapes

__all__ = ["Follows", "Part", "Program", "Work", "assemble"]

Follows = Literal["same", "stream", "graph", "dependent"]
"""In the same launch as the part before, or how its launch follows that one."""
ANNOUNCING = (Op.ROUTER, Op.DOWN)
"""Their results tell by themselves that they are there, before their counter does."""


@dataclass(frozen=True)
class Part:
    """A plan, how it follows the part before, and whether its tasks are in the record."""

    plan: Plan
    follows: Follows = "same"
    shown: bool = True


class Work:
    """A task in its SM's list: what it waits for, what it takes, and when things happened.

    Attributes:
        task, shape: what it is.
        part, launch: their numbers.
        shown: it is in the record.
        wait, signal, router: keys of counters, of which `router` is that of the logits in which the
            helper finds the experts.
        announces: key of a counter of announcements, which come before the signal.
        finds: the first of its layer that needs the experts.
        releases: the last of its layer that needs them.
        beside: the helper does it.
        holds: in a wait for it the loader holds back.
        begin, ready, end, issued: ns; -1 if it has not happened.
    """

    __slots__ = (
        "announces", "begin", "beside", "end", "finds", "holds", "issued", "launch", "part",
        "ready", "releases", "router", "shape", "shown", "signal", "task", "wait",
    )  # fmt: skip

    def __init__(self, task: Task, shape: Shape, part: int, launch: int, shown: bool) -> None:
        self.task, self.shape, self.shown = task, shape, shown
        self.part, self.launch = part, launch
        self.wait = self.signal = self.router = self.announces = NOTHING
        self.finds = self.releases = self.beside = self.holds = False
        self.begin = self.ready = self.end = self.issued = -1.0


@dataclass(frozen=True)
class Program:
    """Lists of all SMs.

    Attributes:
        works: of each SM.
        follows: for each launch how it follows the one before.
        n_counters: of all parts together; one more per launch tells when it has ended.
        arrivals: a key for each arrival that will come.
        of_x: keys of announcements of x.
    """

    works: list[list[Work]]
    follows: list[Follows]
    n_counters: int
    arrivals: list[int]
    of_x: set[int] = field(default_factory=set)

    def end_key(self, launch: int) -> int:
        """Key of the counter of SMs that have ended a launch."""
        return self.n_counters - len(self.follows) + launch

    def may_miss(self, one_in: int) -> dict[int, int]:
        """For each key of announcements of x, how many need not have come."""
        expected = Counter(key for key in self.arrivals if key in self.of_x)
        return {key: n // one_in if one_in else 0 for key, n in expected.items()}


def assemble(parts: Sequence[Part], shapes: Shapes, switches: Switches) -> Program:
    """Put the parts one behind the other on every SM.

    Args:
        parts: in order.
        shapes: of their tasks.
        switches: of the kernel.
    """
    follows = [part.follows for i, part in enumerate(parts) if i == 0 or part.follows != "same"]
    each = max(len(part.plan.counters) for part in parts)
    # A counter, and beside it a word for announcements.
    program = Program([], follows, 2 * each * len(parts) + len(follows), [])
    early = shapes.situation.rows <= switches.early_rows
    for sm in range(parts[0].plan.n_sm):
        mine: list[Work] = []
        launch = -1
        for number, part in enumerate(parts):
            launch += number == 0 or part.follows != "same"
            mine += _list(part, sm, number, launch, shapes, switches.merge_rows)
        _link(mine, program, each, early=early, announced=switches.announced)
        _hold_back(mine, program, switches)
        program.works.append(mine)
    return program


def _list(
    part: Part, sm: int, number: int, launch: int, shapes: Shapes, merge_rows: int
) -> list[Work]:
    """One SM's tasks of a part."""
    helped = shapes.situation.rows > merge_rows
    out: list[Work] = []
    normed = finding = -1  # layers
    for task in part.plan.tasks[sm]:
        shape = shapes.of(task, normed=normed == task.layer)
        work = Work(task, shape, number, launch, part.shown)
        if task.op in OF_X:
            normed = task.layer
        if task.op in ROUTED:
            work.finds, finding = task.layer != finding, task.layer
            work.releases = bool(task.flags & Flag.RELEASE)
        work.beside = helped and task.op == Op.MERGE
        out.append(work)
    return out


def _link(
    works: Sequence[Work], program: Program, each: int, *, early: bool, announced: bool
) -> None:
    """Keys of counters: in a part first those of the plan, then the announcements beside them."""
    for work in works:
        task, base = work.task, 2 * work.part * each
        route = task.route_wait if task.op in ROUTED else NO_COUNTER
        work.wait, work.signal, work.router = (
            NOTHING if c == NO_COUNTER else base + c for c in (task.wait, task.signal, route)
        )
        if early and task.flags & Flag.EARLY and work.wait != NOTHING:
            work.wait += each
        if announced and work.router != NOTHING:
            work.router += each
        if work.signal != NOTHING:
            program.arrivals.append(work.signal)
            if task.op in ANNOUNCING:
                work.announces = work.signal + each
                program.arrivals.append(work.announces)
                if task.op == Op.DOWN:
                    program.of_x.add(work.announces)


def _hold_back(works: Sequence[Work], program: Program, switches: Switches) -> None:
    """What depends on the task before; and who tells that a launch has ended."""
    for beside in (False, True):
        last, launch = Op.SAMPLE, -1
        for work in (work for work in works if work.beside == beside):
            if work.launch != launch:
                launch, last = work.launch, Op.SAMPLE
                program.arrivals.append(program.end_key(launch))
            work.holds, last = last in switches.hold_back_after, Op(work.task.op)
