"""What the explorer shows: one layer of a plan, at one moment of a step, and who is asked about.

SMs of a small machine have a row each. On a large one those with equal lists share a row, for a
layer of 132 SMs has two or three kinds of lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from mkref.errors import RequestError
from mkref.plan.task import NO_COUNTER, Op
from mkref.widgets.plan.graph import experts_through
from mkref.widgets.plan.progress import NOTHING, Lack, Progress, Snapshot

if TYPE_CHECKING:
    from mkref.widgets.plan.graph import LayerGraph

__all__ = ["Cell", "PlanView", "Row", "ranges"]

MAX_SMS = 8
"""So many SMs have a row each."""


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in words, neighbours together.

    >>> ranges([0, 1, 2, 3, 7]), ranges([5]), ranges(range(0, 9, 2))
    ('0 to 3, 7', '5', '0, 2, 4, 6, 8')
    >>> ranges(range(0, 400, 2))
    '0, 2, 4, 6 and 196 more'
    """
    ends = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    runs = [numbers[a:b] for a, b in pairwise(ends)]
    shown = runs if len(runs) <= 6 else runs[:4]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in shown]
    left = len(numbers) - sum(map(len, shown))
    return ", ".join(parts) + (f" and {left} more" if left else "")


@dataclass(frozen=True)
class Cell:
    """The same task of all SMs of a row.

    Attributes:
        op: its name.
        records: numbers of the tasks, one per SM.
        n_done: of them, those that are over.
        n_ready: those that are next on their SM and lack nothing.
        n_waiting: those that are next and lack something.
    """

    op: str
    records: tuple[int, ...]
    n_done: int
    n_ready: int
    n_waiting: int


@dataclass(frozen=True)
class Row:
    """SMs with equal lists in this layer, and their tasks."""

    sms: tuple[int, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, eq=False)
class PlanView:
    """One layer at one moment.

    Attributes:
        progress: of the plan.
        layer: 0 to L - 1; L for what comes after the last layer.
        moment: how far the step has come.
        selected: a task whose dependencies are shown; `NOTHING` for none.
        tokens: what the step has drawn, where it was really computed and is over.
        computed: an interpreter computes every task.
    """

    progress: Progress
    layer: int
    moment: Snapshot
    selected: int = NOTHING
    tokens: tuple[int, ...] = ()
    computed: bool = False

    def __post_init__(self) -> None:
        n = len(self.progress.tasks)
        if self.selected != NOTHING and not 0 <= self.selected < n:
            raise RequestError(f"selected: task {self.selected} of a plan with tasks 0 to {n - 1}")

    @property
    def graph(self) -> LayerGraph:
        """The layer as a graph."""
        return self.progress.graph(self.layer)

    @cached_property
    def rows(self) -> list[Row]:
        """SMs and their tasks, in the order of their first SM."""
        plan, groups = self.progress.plan, dict[tuple[int, ...], list[int]]()
        mine = self.progress.lists(self.layer)
        for sm in range(plan.n_sm):
            kind = tuple(self.progress.tasks[r].op for r in mine[sm])
            key = kind if plan.n_sm > MAX_SMS else (sm,)
            groups.setdefault(key, []).append(sm)
        return [
            Row(
                tuple(sms),
                tuple(self._cell(each) for each in zip(*(mine[sm] for sm in sms), strict=True)),
            )
            for sms in groups.values()
        ]

    def _cell(self, records: tuple[int, ...]) -> Cell:
        progress, moment = self.progress, self.moment
        heads = [r for r in records if progress.next_of(moment, progress.sm_of[r]) == r]
        ready = sum(progress.lack(moment, r) is None for r in heads)
        done = sum(progress.is_done(moment, r) for r in records)
        op = self.op(records[0])
        return Cell(op, records, done, ready, len(heads) - ready)

    def op(self, record: int) -> str:
        """Name of a task's operation."""
        op = self.progress.tasks[record].op
        return Op(op).name if op in set(Op) else f"opcode {op}"

    def counter(self, counter: int) -> str:
        """Name of a counter."""
        return self.progress.plan.counters[counter].name

    def counted(self, records: Iterable[int]) -> str:
        """`4 QKV on SMs 0 to 3`: tasks by operation."""
        records = list(records)
        ops = Counter(self.progress.tasks[r].op for r in records)
        parts = []
        for op, n in sorted(ops.items()):
            mine = [r for r in records if self.progress.tasks[r].op == op]
            sms = sorted({self.progress.sm_of[r] for r in mine})
            parts.append(f"{n} {self.op(mine[0])} on SM{'s' * (len(sms) > 1)} {ranges(sms)}")
        return ", ".join(parts)

    def why(self, record: int, lack: Lack) -> str:
        """What a task lacks, and from whom."""
        if lack.counter == NO_COUNTER:
            return f"the place for its experts, which layer {lack.layer} never gives back"
        missing = self.progress.missing(self.moment, lack.counter)
        from_whom = self.counted(missing) if missing else "nobody: no task is left that signals it"
        what = "its experts, from counter" if lack.experts else "counter"
        return (
            f"{what} {self.counter(lack.counter)} ({lack.have} of {lack.want}); "
            f"still to come: {from_whom}"
        )

    def state(self, sm: int) -> str:
        """What an SM is at."""
        record = self.progress.next_of(self.moment, sm)
        if record == NOTHING:
            return "done"
        lack = self.progress.lack(self.moment, record)
        task = self.progress.tasks[record]
        name = f"{self.op(record)} of layer {task.layer}"
        return f"{name} can start" if lack is None else f"{name} waits for {self.why(record, lack)}"

    def describe_selected(self) -> str:
        """Who the selected task waits for, and who waits for it; "" if there is none."""
        if self.selected == NOTHING:
            return ""
        record, progress = self.selected, self.progress
        task = progress.tasks[record]
        parts = [f"Selected: {progress.name(record)}."]
        waits = ((task.wait, "It waits for"), (experts_through(task), "Its loader waits for"))
        for counter, what in waits:
            if counter != NO_COUNTER:
                target = progress.plan.counters[counter].target
                parts.append(
                    f"{what} {self.counter(counter)} "
                    f"({self.moment.arrivals[counter]} of {target}), "
                    f"which {self.counted(progress.signals[counter])} signal."
                )
        if task.wait == NO_COUNTER:
            parts.append("It waits for no counter.")
        if task.route_wait not in (NO_COUNTER, experts_through(task)):
            before = self.counter(task.route_wait)
            parts.append(f"Its loader waits for {before} of the step before.")
        if task.signal != NO_COUNTER:
            waiting = progress.waiting[task.signal]
            whom = f"{self.counted(waiting)} wait" if waiting else "nobody waits"
            parts.append(f"It signals {self.counter(task.signal)}, for which {whom}.")
        else:
            parts.append("It signals nothing.")
        if progress.is_done(self.moment, record):
            parts.append("It is done.")
        elif progress.next_of(self.moment, progress.sm_of[record]) != record:
            parts.append("It is not its turn yet.")
        else:
            lack = progress.lack(self.moment, record)
            parts.append("It can start." if lack is None else f"It lacks {self.why(record, lack)}.")
        return " ".join(parts)
