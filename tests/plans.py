"""Plans of the small model, and how to damage them. No tests here."""

from __future__ import annotations

from dataclasses import replace

from mkref.plan import NO_COUNTER, Counter, Flag, Op, Plan, Task, build_plan
from tests.decode import small_config

__all__ = ["change", "counter", "find", "plan_of", "recount", "with_list"]


def plan_of(n_sm: int = 3, **changes: object) -> Plan:
    """A plan of the small model for 512 tokens."""
    return build_plan(small_config(**changes), n_sm, full_pages=8, sliding_pages=8)


def find(plan: Plan, op: Op, layer: int, sm: int) -> tuple[int, Task]:
    """Position and task of the first such task of an SM."""
    for i, task in enumerate(plan.tasks[sm]):
        if (task.op, task.layer) == (op, layer):
            return i, task
    raise LookupError(f"SM {sm} has no {op.name} of layer {layer}")


def with_list(plan: Plan, sm: int, tasks: list[Task]) -> Plan:
    """The plan with another list for one SM."""
    lists = [*plan.tasks]
    lists[sm] = tuple(tasks)
    return replace(plan, tasks=tuple(lists))


def change(plan: Plan, op: Op, layer: int, sm: int, /, **words: int) -> Plan:
    """The plan with some words of one task changed."""
    at, task = find(plan, op, layer, sm)
    tasks = [*plan.tasks[sm]]
    tasks[at] = replace(task, **words)
    return with_list(plan, sm, tasks)


def counter(plan: Plan, name: str) -> int:
    """Index of a counter."""
    return [c.name for c in plan.counters].index(name)


def recount(plan: Plan) -> Plan:
    """Targets, awaited arrivals and flags of what is last as the tasks now are: leaves only what is
    wrong with order.
    """
    signals = [task.signal for _, _, task in plan]
    arrivals = [signals.count(i) for i in range(len(plan.counters))]

    def aim(task: Task) -> Task:
        return replace(
            task,
            wait_count=0 if task.wait == NO_COUNTER else arrivals[task.wait],
            route_count=0 if task.route_wait == NO_COUNTER else arrivals[task.route_wait],
        )

    return replace(
        plan,
        tasks=tuple(tuple(aim(t) for t in _mark(tasks)) for tasks in plan.tasks),
        counters=tuple(Counter(c.name, n) for c, n in zip(plan.counters, arrivals, strict=True)),
    )


def _mark(tasks: tuple[Task, ...]) -> list[Task]:
    bits = Flag.RELEASE | Flag.LAST_OF_LAYER
    last = {task.layer: i for i, task in enumerate(tasks)}
    users = {t.layer: i for i, t in enumerate(tasks) if t.op in (Op.GATE_UP, Op.DOWN)}
    return [
        replace(
            task,
            flags=task.flags & ~bits
            | (Flag.LAST_OF_LAYER if last[task.layer] == i else 0)
            | (Flag.RELEASE if users.get(task.layer) == i else 0),
        )
        for i, task in enumerate(tasks)
    ]
