"""What is simulated, SM by SM: the tasks of one or more plans one after another.

A part is a plan and how it follows the part before: in the same launch, or in a launch of its own.
A step in several launches has a part for each. A step in the middle of a long launch has two: the
end of the step before, so that the rings are as full as they are then, and the step itself.

What it does not do: time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mkref.plan.effects import ROUTED
from mkref.plan.task import NO_COUNTER, Flag, Op
from mkref.simulate.counters import NOTHING
from mkref.simulate.work import OF_X

if TYPE_CHECKING:
    from mkref.plan.build import Plan
    from mkref.plan.task import Task
    from mkref.simulate.work import Shape, Shapes

__all__ = ["Follows", "Part", "Program", "Work", "assemble"]

Follows = Literal["same", "stream", "graph", "dependent"]
"""In the same launch as the part before, or how its launch follows that one."""
HOLD_BACK_AFTER = (Op.EMBED, Op.QKV, Op.DOWN)
"""As in the kernel: in a wait after one of these the loader holds back."""


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
        opens: it is the first of its SM in a launch that is not the first of all.
        wait, signal, router: keys of counters, of which `router` is that of the logits in which the
            helper finds the experts.
        finds: the first of its layer that needs the experts.
        releases: the last of its layer that needs them.
        beside: the helper does it.
        holds: in a wait for it the loader holds back.
        begin, ready, end, issued: ns; -1 if it has not happened.
    """

    __slots__ = (
        "begin", "beside", "end", "finds", "holds", "issued", "launch", "opens", "part", "ready",
        "releases", "router", "shape", "shown", "signal", "task", "wait",
    )  # fmt: skip

    def __init__(self, task: Task, shape: Shape, part: int, launch: int, shown: bool) -> None:
        self.task, self.shape, self.shown = task, shape, shown
        self.part, self.launch = part, launch
        self.wait = self.signal = self.router = NOTHING
        self.finds = self.releases = self.beside = self.holds = self.opens = False
        self.begin = self.ready = self.end = self.issued = -1.0


@dataclass(frozen=True)
class Program:
    """Lists of all SMs.

    Attributes:
        works: of each SM.
        follows: for each launch how it follows the one before.
        n_counters: of all parts together; one more per launch tells when it has ended.
        arrivals: a key for each arrival that will come.
    """

    works: list[list[Work]]
    follows: list[Follows]
    n_counters: int
    arrivals: list[int]

    def end_key(self, launch: int) -> int:
        """Key of the counter of SMs that have ended a launch."""
        return self.n_counters - len(self.follows) + launch


def assemble(parts: Sequence[Part], shapes: Shapes, merge_rows: int) -> Program:
    """Put the parts one behind the other on every SM.

    Args:
        parts: in order.
        shapes: of their tasks.
        merge_rows: as in `Switches`.
    """
    follows = [part.follows for i, part in enumerate(parts) if i == 0 or part.follows != "same"]
    each = max(len(part.plan.counters) for part in parts)
    program = Program([], follows, each * len(parts) + len(follows), [])
    for sm in range(parts[0].plan.n_sm):
        mine: list[Work] = []
        launch = -1
        for number, part in enumerate(parts):
            launch += number == 0 or part.follows != "same"
            mine += _list(part, sm, number, launch, shapes, merge_rows)
        _link(mine, program, each)
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


def _link(works: list[Work], program: Program, each: int) -> None:
    """Keys of counters, and what depends on the task before."""
    for work in works:
        task = work.task
        work.wait, work.signal, work.router = (
            NOTHING if c == NO_COUNTER else work.part * each + c
            for c in (task.wait, task.signal, task.route_wait if task.op in ROUTED else NO_COUNTER)
        )
        if work.signal != NOTHING:
            program.arrivals.append(work.signal)
    for beside in (False, True):
        last, launch = Op.SAMPLE, -1
        for work in (work for work in works if work.beside == beside):
            if work.launch != launch:
                launch, last = work.launch, Op.SAMPLE
                work.opens = launch > 0
                program.arrivals.append(program.end_key(launch))
            work.holds, last = last in HOLD_BACK_AFTER, Op(work.task.op)
