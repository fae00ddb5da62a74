"""Lesson 09, exercise 09.1: the plan with a learner's counters, and what is asked of it.

with_barriers, producers, unread    the plan with barriers, and which of its waits are needed
PROPERTIES                          what `counters_of` must do, with the verifier's word
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mkref.lessons.exercise import EMPTY, Answer, Property, WrongAnswerError
from mkref.lessons.steps import lesson_plan, proved, same_step
from mkref.measure.rungs import barriers, plain
from mkref.plan import NO_COUNTER, Op, Plan
from mkref.plan.build import Counter
from mkref.plan.effects import READS, SAME_THREADS, WRITES, Touch
from mkref.plan.table import TaskTable
from mkref.plan.verify import check_places

if TYPE_CHECKING:
    from mkref.plan.task import Task

__all__ = ["PROPERTIES", "Names", "producers", "unread", "with_barriers"]

SIZES = (1, 3, 5)
"""SMs of the plans that are tried."""
Names = tuple[str | None, str | None]


# ---- plans


def with_barriers(n_sm: int) -> Plan:
    """A plan of the lessons in the order of the model, with a counter per operation."""
    return barriers(_in_turn(n_sm))


def _in_turn(n_sm: int) -> Plan:
    """The order of the model, in the form that the verifier asks for."""
    plan = lesson_plan(n_sm)
    index = {task.layer: task.index for _, _, task in plan if task.op == Op.GATE_UP}
    return _each(
        plain(plan), lambda t: replace(t, index=index[t.layer]) if t.op == Op.GATE_UP else t
    )


def _each(plan: Plan, change: Callable[[Task], Task]) -> Plan:
    return replace(plan, tasks=tuple(tuple(map(change, tasks)) for tasks in plan.tasks))


def producers(op: Op, layer: int, *, own: bool = True) -> set[tuple[Op, int]]:
    """Operations, with their layers, that write something which a task reads in the same step.

    Args:
        op, layer: of the task.
        own: with those of which a task finds all that it reads on its own SM.
    """
    found = set()
    for read in READS[op]:
        if read.of_step_before or (not own and _on_own_sm(read)):
            continue
        for source in _writers(read):
            if source[0] != Op.EMBED or not layer:
                found.add((source[0], layer + source[1]))
    return {(source, at) for source, at in found if at >= 0}


def _on_own_sm(read: Touch) -> bool:
    """Rows that the same threads have written before."""
    return read.part == "rows" and read.buffer in SAME_THREADS


def _writers(read: Touch) -> Iterator[tuple[Op, int]]:
    """Operations that write what is read; -1 with those that write it for the next layer."""
    for source in Op:
        for write in WRITES[source]:
            if write.buffer == read.buffer:
                yield source, -(write.layer == "next")


def _waits(plan: Plan, layer: int) -> Iterator[tuple[Op, tuple[Op, int]]]:
    """Pairs (task, whom of which layer it waits for) of a layer."""
    makers: dict[int, set[tuple[Op, int]]] = {}
    for _, _, task in plan:
        makers.setdefault(task.signal, set()).add((Op(task.op), task.layer))
    seen = set()
    for _, _, task in plan:
        if task.layer != layer or task.wait == NO_COUNTER or task.op in seen:
            continue
        seen.add(task.op)
        for source in sorted(makers.get(task.wait, set())):
            yield Op(task.op), source


def unread(plan: Plan, layer: int) -> Iterator[tuple[Op, Op]]:
    """Pairs (task, whom it waits for) of a layer in which nothing of the second is read."""
    for op, source in _waits(plan, layer):
        if source not in producers(op, layer):
            yield op, source[0]


# ---- 09.1


def _names(answer: Answer, op: Op, layer: int) -> Names:
    given = answer(op.name, layer)
    where = f"{op.name} of layer {layer}"
    if given is None and all(answer(other.name, 1) is None for other in Op):
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise WrongAnswerError(
            f"{where}: it returns {given!r:.60}, and not a pair (wait, signal); no counter is None "
            "in the pair"
        )
    for name in given:
        if name is not None and (not isinstance(name, str) or not name):
            raise WrongAnswerError(f"{where}: {name!r:.60} is no name of a counter")
    return given[0], given[1]


def _counted(answer: Answer, n_sm: int) -> Plan:
    """The plan with the counters of the answer."""
    plan = _in_turn(n_sm)
    kinds = dict.fromkeys((Op(t.op), t.layer) for _, _, t in plan)
    named = {kind: _names(answer, *kind) for kind in kinds}
    arrivals: dict[str, int] = {}
    for _, _, task in plan:
        signal = named[Op(task.op), task.layer][1]
        if signal is not None:
            arrivals[signal] = arrivals.get(signal, 0) + 1
    for (op, layer), (wait, _) in named.items():
        if wait is not None and wait not in arrivals:
            if (Op.ROUTER, layer) not in named and _is_of_router(answer, wait, layer):
                raise WrongAnswerError(
                    f"{op.name} of layer {layer} waits for ROUTER, and layer {layer} has none"
                )
            raise WrongAnswerError(
                f"{op.name} of layer {layer} waits for {wait!r}, which nobody signals"
            )
        if op == Op.ROUTER and named[op, layer][1] is None:
            raise WrongAnswerError(
                f"ROUTER of layer {layer} signals no counter; the helper waits for it"
            )
    number = {name: i for i, name in enumerate(arrivals)}

    def aim(task: Task) -> Task:
        wait, signal = named[Op(task.op), task.layer]
        route = NO_COUNTER
        if task.route_wait != NO_COUNTER:
            source = Op.MERGE if task.op == Op.ATTENTION else Op.ROUTER
            name = named[source, task.layer][1]
            route = NO_COUNTER if name is None else number[name]
        counters = list(arrivals.values())
        return replace(
            task,
            wait=NO_COUNTER if wait is None else number[wait],
            wait_count=0 if wait is None else arrivals[wait],
            route_wait=route,
            route_count=0 if route == NO_COUNTER else counters[route],
            signal=NO_COUNTER if signal is None else number[signal],
        )

    # Named after who signals it: what a wrong plan leads to does not depend on the learner's names.
    makers = {named[kind][1]: f"of {kind[0].name}{kind[1]}" for kind in reversed(named)}
    counters = tuple(Counter(makers[name], target) for name, target in arrivals.items())
    return replace(_each(plan, aim), counters=counters)


def _is_of_router(answer: Answer, name: str, layer: int) -> bool:
    """Whether ROUTER would signal the counter in a layer that has no ROUTER."""
    try:
        return name == _names(answer, Op.ROUTER, layer)[1]
    except Exception:  # nobody has asked the learner for that layer's ROUTER
        return False


def _pairs(answer: Answer) -> None:
    for op in Op:
        _names(answer, op, 0 if op == Op.EMBED else 3)
    _counted(answer, 3)


def _proved(answer: Answer) -> None:
    for n_sm in SIZES:
        plan = _counted(answer, n_sm)
        try:
            proved(plan)
        except WrongAnswerError as wrong:
            said = str(wrong)
            found = check_places(TaskTable(plan))
            reads = [text for text in found if "reads" in text and "without a wait" in text]
            if reads and said.endswith(found[0]):  # the plainest of what it has found
                said = said.removesuffix(found[0]) + reads[0]
            raise WrongAnswerError(said) from wrong


def _same_bits(answer: Answer) -> None:
    for n_sm in SIZES[1:]:
        same_step(_counted(answer, n_sm), orders=(1, 2), rows=2)


def _nothing_in_vain(answer: Answer) -> None:
    plan = _counted(answer, 3)
    for layer in range(plan.config.num_hidden_layers + 1):
        for op, (source, at) in _waits(plan, layer):
            who = f"{op.name} of layer {layer} waits for {source.name} of layer {at}"
            if (source, at) not in producers(op, layer):
                raise WrongAnswerError(f"{who}, and reads nothing of it in the same step")
            if (source, at) not in producers(op, layer, own=False):
                raise WrongAnswerError(f"{who}, and finds all it reads of it on its own SM")


def _nobody_idle(answer: Answer) -> None:
    plan = _counted(answer, 3)
    waited = {c for _, _, t in plan for c in (t.wait, t.route_wait)}
    for _, _, task in plan:
        if task.signal != NO_COUNTER and task.signal not in waited:
            raise WrongAnswerError(
                f"{Op(task.op).name} of layer {task.layer} signals a counter for which nobody waits"
            )


# What is quickly found comes first: known mistakes are told apart by the first difference.
PROPERTIES = (
    Property("every wait is for a counter that somebody signals", _pairs),
    Property("no task waits for what it does not read, or has on its SM", _nothing_in_vain),
    Property("nobody signals what nobody waits for", _nobody_idle),
    Property("the verifier proves the plans for 1, 3 and 5 SMs", _proved),
    Property("a step has the same bits in other orders", _same_bits),
)
