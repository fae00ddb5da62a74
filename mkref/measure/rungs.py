"""Plans for the ladder: the same tasks in other orders, with other counters, in several launches.

Each function takes a plan and returns another one that computes the same bits:

    plain     operations in the order of the model, each divided among the SMs for itself
    barriers  a counter per operation: nobody begins one before all SMs have ended the one before
    split     one launch per group of operations, with the counters that are left inside a launch

What it does not do: build a plan from a geometry (`mkref.plan.build`), or run one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mkref.plan.build import Counter, Plan
from mkref.plan.effects import HELPED, ROUTED, ROW_OPS
from mkref.plan.share import share
from mkref.plan.task import NO_COUNTER, Flag, Op, Task

__all__ = ["FEW", "FOUR", "ORDER", "SINGLE", "barriers", "plain", "split"]

ORDER: tuple[Op, ...] = (
    *(Op.EMBED, Op.ROUTER, Op.QKV, Op.ATTENTION, Op.MERGE, Op.O_PROJ, Op.GATE_UP, Op.DOWN),
    *(Op.HEAD, Op.SAMPLE),
)
"""A layer without back-filling: attention up to its projection, then the experts."""

SINGLE = tuple((op,) for op in ORDER)
"""One launch per operation."""
FOUR = (
    (Op.EMBED,),
    (Op.ROUTER, Op.QKV),
    (Op.ATTENTION,),
    (Op.GATE_UP, Op.MERGE),
    (Op.O_PROJ, Op.DOWN),
    (Op.HEAD, Op.SAMPLE),
)
"""Four launches per layer: what reads the same input goes together."""
FEW = (
    (Op.EMBED,),
    (Op.ROUTER, Op.QKV),
    (Op.ATTENTION, Op.GATE_UP, Op.MERGE),
    (Op.O_PROJ, Op.DOWN),
    (Op.HEAD, Op.SAMPLE),
)
"""Three launches per layer; gate and up hide the attention of the slowest SM."""

GEOMETRY = Flag.ROPE | Flag.SLIDING | Flag.DENSE
"""Flags that follow from the model; all others belong to an order of tasks."""


def plain(plan: Plan) -> Plan:
    """The order of the model, without balance across operations.

    Rows of every operation are divided for themselves: those of the router are not spread, and
    gate and up do not make up for uneven shares of router and q, k, v.
    """
    totals: dict[tuple[int, int], int] = {}
    for _, _, task in plan:
        key = (task.op, task.layer)
        totals[key] = max(totals.get(key, 0), task.first + task.count)
    samples = {(t.op, t.layer): t for _, _, t in plan if t.op in ROW_OPS}
    lists = []
    for sm, tasks in enumerate(plan.tasks):
        mine = [replace(t, index=0) if t.op == Op.GATE_UP else t for t in tasks]
        mine = [t for t in mine if t.op not in ROW_OPS or t.op == Op.HEAD]
        for (op, layer), sample in samples.items():
            begin, end = share(totals[op, layer], plan.n_sm, sm)
            if op != Op.HEAD and end > begin:
                mine.append(replace(sample, first=begin, count=end - begin))
        mine.sort(key=lambda t: (t.layer, ORDER.index(Op(t.op)), t.first))
        lists.append(mine)
    return _counted(plan, lists, [c.name for c in plan.counters])


def barriers(plan: Plan) -> Plan:
    """A barrier between operations, in the order in which SM 0 has them.

    Args:
        plan: on every SM the operations of a layer come in the same order.
    """
    phases = sorted(
        {(t.layer, ORDER.index(Op(t.op))) for _, _, t in plan},
    )
    names = [f"{ORDER[at].name}{layer}" for layer, at in phases[:-1]]
    number = {phase: i for i, phase in enumerate(phases)}

    def aim(task: Task) -> Task:
        own = number[task.layer, ORDER.index(Op(task.op))]
        route = task.route_wait
        if route != NO_COUNTER:
            source = Op.MERGE if task.op == Op.ATTENTION else Op.ROUTER
            route = number[task.layer, ORDER.index(source)]
        return replace(
            task,
            wait=own - 1,  # the first one: NO_COUNTER
            signal=own if own < len(names) else NO_COUNTER,
            route_wait=route,
        )

    return _counted(plan, [[aim(t) for t in tasks] for tasks in plan.tasks], names)


def split(plan: Plan, groups: Sequence[Sequence[Op]]) -> list[Plan]:
    """One plan per launch, in order; run one after another they are one step.

    A list of a launch may be empty, and does not end with SAMPLE: the kernel then ends after the
    list's last record. Between launches no counter is needed.

    Args:
        plan: its counters stay; those that nobody waits for within a launch get no arrivals.
        groups: operations that share a launch, in the order in which an SM does them.
    """
    group_of = {op: i for i, group in enumerate(groups) for op in group}
    order = {op: i for group in groups for i, op in enumerate(group)}
    keys = sorted({(t.layer, group_of[Op(t.op)]) for _, _, t in plan})
    lists: dict[tuple[int, int], list[list[Task]]] = {
        key: [[] for _ in range(plan.n_sm)] for key in keys
    }
    for sm, _, task in plan:
        lists[task.layer, group_of[Op(task.op)]][sm].append(task)
    out = []
    for key in keys:
        for tasks in lists[key]:
            tasks.sort(key=lambda t: (order[Op(t.op)], t.first))
        out.append(replace(plan, tasks=tuple(map(tuple, _closed(lists[key])))))
    return out


def _closed(lists: Sequence[Sequence[Task]]) -> list[list[Task]]:
    """Tasks of one launch, with counters only for what is inside."""
    every = [t for tasks in lists for t in tasks]
    inside = {t.signal for t in every} & {c for t in every for c in (t.wait, t.route_wait)}

    def keep(task: Task) -> Task:
        waits, routes = task.wait in inside, task.route_wait in inside
        return replace(
            task,
            wait=task.wait if waits else NO_COUNTER,
            wait_count=task.wait_count if waits else 0,
            route_wait=task.route_wait if routes else NO_COUNTER,
            route_count=task.route_count if routes else 0,
            signal=task.signal if task.signal in inside else NO_COUNTER,
            flags=task.flags & GEOMETRY,
        )

    out = [[keep(t) for t in tasks] for tasks in lists]
    for tasks in out:
        # The consumers end the launch, so the last record must be theirs: one without rows.
        if tasks and tasks[-1].op in HELPED:
            tasks.append(Task(Op.EMBED, layer=0, first=0, count=0))
    return out


def _counted(plan: Plan, lists: Iterable[Sequence[Task]], names: Sequence[str]) -> Plan:
    """A plan of these lists; arrivals are counted, and flags of what is last are set anew."""
    lists = [_marked(tasks) for tasks in lists]
    arrivals = [0] * len(names)
    for task in (t for tasks in lists for t in tasks):
        if task.signal != NO_COUNTER:
            arrivals[task.signal] += 1

    def aim(task: Task) -> Task:
        return replace(
            task,
            wait_count=0 if task.wait == NO_COUNTER else arrivals[task.wait],
            route_count=0 if task.route_wait == NO_COUNTER else arrivals[task.route_wait],
        )

    counters = tuple(Counter(n, a) for n, a in zip(names, arrivals, strict=True))
    return replace(
        plan, tasks=tuple(tuple(aim(t) for t in tasks) for tasks in lists), counters=counters
    )


def _marked(tasks: Sequence[Task]) -> list[Task]:
    """The flags of what is last where they belong in this order, and none for short cuts."""
    last = {t.layer: i for i, t in enumerate(tasks)}
    users = {t.layer: i for i, t in enumerate(tasks) if t.op in ROUTED}
    return [
        replace(
            task,
            flags=task.flags & GEOMETRY
            | (Flag.RELEASE if users.get(task.layer) == i else 0)
            | (Flag.LAST_OF_LAYER if last[task.layer] == i else 0),
        )
        for i, task in enumerate(tasks)
    ]
