"""Lesson 12: its exercises, what counters tell and the waits of tasks that have nothing to do.

The first is the heart of the verifier in small. The second is a fault that this repository had: the
learner mends a plan, and the verifier says whether it is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.steps import lesson_plan, proved, same_step
from mkref.plan import NO_COUNTER, Op, Plan
from mkref.plan.task import Flag, Task

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["EXERCISES", "IDLE_OPS", "clocks", "with_waits", "without_waits"]

Lists = Sequence[Sequence[tuple[str | None, str | None]]]
IDLE_OPS = (Op.O_PROJ, Op.DOWN)
"""Operations of which an SM may have no rows, and yet must wait for their inputs."""
SIZES = (7, 9, 11)
"""SMs of the plans that are mended: more than DOWN has row blocks."""


def clocks(lists: Lists) -> list[list[tuple[int, ...]]]:
    """What is surely finished when each task starts.

    `lists[sm]` has the tasks of one SM, in order. A task is a pair (wait, signal): the counter that
    must be full before it starts, and the counter at which it arrives when it is done; both are
    names or None. A counter is full when all tasks that signal it are done.

    For every SM, a list with one tuple per task: how many tasks of SM 0, 1, 2, ... are surely
    finished when it starts. A task that never starts has no clock: the list of its SM is shorter.
    """
    # BEGIN SOLUTION
    clock = [[0] * len(lists) for _ in lists]  # what every SM knows now
    # What the arrivals at a counter tell, together.
    told: dict[str | None, list[int]] = {}
    missing = [signal for tasks in lists for _, signal in tasks]
    found: list[list[tuple[int, ...]]] = [[] for _ in lists]
    went_on = True
    while went_on:
        went_on = False
        for sm, tasks in enumerate(lists):
            while len(found[sm]) < len(tasks):
                wait, signal = tasks[len(found[sm])]
                if wait is not None and wait in missing:
                    break
                learnt = told.get(wait, clock[sm])
                clock[sm] = [max(pair) for pair in zip(clock[sm], learnt, strict=True)]
                found[sm].append(tuple(clock[sm]))
                clock[sm][sm] += 1
                if signal is not None:
                    missing.remove(signal)
                    others = told.get(signal, clock[sm])
                    told[signal] = [max(pair) for pair in zip(clock[sm], others, strict=True)]
                went_on = True
    return found
    # END SOLUTION


def with_waits(task: Task, counters: Mapping[str, tuple[int, int]]) -> Task:
    """The task as it must be in the plan.

    Of O_PROJ and DOWN, the tasks without rows (`task.count` is 0) have lost their waits. All other
    tasks are right and come back as they are. `counters` says for a name such as "merge3" (of layer
    3) which number the counter has and how many arrivals fill it; the words of a task are
    `task.wait` and `task.wait_count`.
    """
    # BEGIN SOLUTION
    from dataclasses import replace

    from mkref.plan import Op

    needs = {Op.O_PROJ: f"merge{task.layer}", Op.DOWN: f"h{task.layer}"}
    if task.count or task.op not in needs:
        return task
    wait, wait_count = counters[needs[Op(task.op)]]
    return replace(task, wait=wait, wait_count=wait_count)
    # END SOLUTION


def without_waits(n_sm: int, config: NorthConfig | None = None) -> Plan:
    """A plan in which tasks of O_PROJ and DOWN without rows wait for nothing.

    Args:
        n_sm: of the plan.
        config: the model; default: the small one of the lessons.
    """
    from mkref.plan import build_plan

    plan = lesson_plan(n_sm)
    if config is not None:
        plan = build_plan(config, n_sm, full_pages=64, sliding_pages=64)
    return _changed(plan, lambda task: replace(task, wait=NO_COUNTER, wait_count=0), idle=True)


def _changed(plan: Plan, change: Callable[[Task], Task], *, idle: bool = False) -> Plan:
    lists = (
        tuple(change(t) if not idle or (t.op in IDLE_OPS and t.count == 0) else t for t in tasks)
        for tasks in plan.tasks
    )
    return replace(plan, tasks=tuple(lists))


# ---- 12.1


def _checked(answer: Answer, lists: Lists, where: str) -> None:
    given, right = answer([list(tasks) for tasks in lists]), clocks(lists)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, list | tuple) or len(given) != len(lists):
        raise WrongAnswerError(f"{where}: it returns {given!r:.60}, and not {len(lists)} lists")
    for sm, (mine, theirs) in enumerate(zip(right, given, strict=True)):
        if not isinstance(theirs, list | tuple):
            raise WrongAnswerError(f"{where}: for SM {sm} it gives {theirs!r:.60}, and not a list")
        for at, (known, said) in enumerate(zip(mine, theirs, strict=False)):
            if not isinstance(said, list | tuple) or list(said) != list(known):
                raise WrongAnswerError(
                    f"{where}: task {at} of SM {sm} knows {known}, it says {said!r:.60}"
                )
        if len(mine) != len(theirs):
            raise WrongAnswerError(
                f"{where}: {len(mine)} tasks of SM {sm} ever start, it gives {len(theirs)} clocks"
            )


ALONE: Lists = [[(None, None)] * 3, [(None, None)] * 2]
MESSAGE: Lists = [[("a", None), (None, None)], [(None, None), (None, "a"), (None, None)]]
RELAY: Lists = [[("b", None)], [("a", "b")], [(None, None), (None, "a")]]
TWO: Lists = [[(None, "a")], [(None, None), (None, "a")], [("a", None)], [(None, None), ("a", "b")]]
CIRCLE: Lists = [[(None, "a"), ("c", "b")], [("b", "c"), (None, None)], [("a", None), ("c", None)]]


def _case(lists: Lists, where: str) -> Callable[[Answer], None]:
    return lambda answer: _checked(answer, lists, where)


def _drawn(answer: Answer) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n_sm, names = int(rng.integers(2, 6)), ["a", "b", "c", "d"]
        lists: list[list[tuple[str | None, str | None]]] = [[] for _ in range(n_sm)]
        for at, name in enumerate(names):  # a layer each: nobody waits for a later one
            for sm in range(n_sm):
                for _ in range(int(rng.integers(0, 3))):
                    wait = names[int(rng.integers(0, at))] if at and rng.random() < 0.7 else None
                    lists[sm].append((wait, name if rng.random() < 0.6 else None))
        used = {signal for tasks in lists for _, signal in tasks}
        plain = [[(w if w in used else None, s) for w, s in tasks] for tasks in lists]
        _checked(answer, plain, f"random lists {seed}")


def _walk(
    lists: Lists, *, deep: bool = True, joins: bool = True, needs_all: bool = True,
    counts_itself: bool = True, again: bool = True, all_seen: bool = False,
) -> list[list[tuple[int, ...]]]:  # fmt: skip
    """The solution, with one thing wrong."""
    n = len(lists)
    clock = [[0] * n for _ in lists]
    told: dict[str, list[int]] = {}
    missing = Counter(signal for tasks in lists for _, signal in tasks)
    total = missing.copy()
    found: list[list[tuple[int, ...]]] = [[] for _ in lists]
    before = -1
    while before != sum(map(len, found)) and (again or before < 0):
        before = sum(map(len, found))
        for sm, tasks in enumerate(lists):
            while len(found[sm]) < len(tasks):
                wait, signal = tasks[len(found[sm])]
                if wait is not None and missing[wait] > (0 if needs_all else total[wait] - 1):
                    break
                if wait is not None and wait in told:
                    clock[sm] = np.maximum(clock[sm], told[wait]).tolist()
                found[sm].append(tuple(map(len, found)) if all_seen else tuple(clock[sm]))
                says = list(clock[sm])
                clock[sm][sm] += 1
                if counts_itself:
                    says[sm] += 1
                if not deep:
                    says = [k if i == sm else 0 for i, k in enumerate(says)]
                if signal is not None:
                    missing[signal] -= 1
                    old = told.get(signal, [0] * n) if joins else [0] * n
                    told[signal] = np.maximum(old, says).tolist()
    return found


_CLOCKS = PythonExercise(
    id="12.1",
    solution=clocks,
    properties=(
        Property("without counters an SM knows only itself", _case(ALONE, "two SMs, no counters")),
        Property("a counter tells what its signaller has done", _case(MESSAGE, "one message")),
        Property("and what its signaller knew", _case(RELAY, "SM 2 tells SM 1, SM 1 tells SM 0")),
        Property("a counter is full when all have arrived", _case(TWO, "two signal one counter")),
        Property("tasks in a circle have no clock", _case(CIRCLE, "SM 0 and SM 1 in a circle")),
        Property("twenty random lists", _drawn),
    ),
    mistakes=(
        Mistake(
            lambda lists: _walk(lists, all_seen=True),
            "this is what *had* finished in the order in which you happened to run the tasks. In "
            "another order it is different. What does the task know because a counter told it?",
        ),
        Mistake(
            lambda lists: _walk(lists, deep=False),
            "a signaller passes on more than its own tasks: whatever it knew is finished, too.",
        ),
        Mistake(
            lambda lists: _walk(lists, joins=False),
            "the last arrival overwrites what the others told. Who waits for all may conclude "
            "from all: take the maximum, number by number.",
        ),
        Mistake(
            lambda lists: _walk(lists, needs_all=False),
            "this goes on after the first arrival. The counter is full when *all* tasks that "
            "signal it are done.",
        ),
        Mistake(
            lambda lists: _walk(lists, counts_itself=False),
            "the arrival comes when the task is done, so it tells of the task itself, too.",
        ),
        Mistake(
            lambda lists: _walk(lists, again=False),
            "one pass over the SMs is not enough: SM 0 may wait for SM 2. When is it certain that "
            "nobody can go on?",
        ),
    ),
    then="Now find the same lines in `mkref/plan/clocks.py`: `learn` and `work`.",
)


# ---- 12.2


def _mended(answer: Answer, n_sm: int) -> Plan:
    plan = without_waits(n_sm)
    counters = {c.name: (i, c.target) for i, c in enumerate(plan.counters)}
    return _changed(plan, lambda task: _task(answer(task, dict(counters))))


def _pairs(answer: Answer, n_sm: int) -> Iterator[tuple[int, int, Task, Task]]:
    """SM, position, the task of the answer and the task of a right plan."""
    for (sm, at, new), (_, _, old) in zip(_mended(answer, n_sm), lesson_plan(n_sm), strict=True):
        yield sm, at, new, old


def _task(given: Any) -> Task:
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, Task):
        raise WrongAnswerError(f"it returns {given!r:.60}, which is no task")
    return given


def _proved(answer: Answer) -> None:
    for n_sm in SIZES:
        proved(_mended(answer, n_sm))


def _still_early(answer: Answer) -> None:
    for n_sm in SIZES:
        for sm, at, new, old in _pairs(answer, n_sm):
            if old.flags & Flag.EARLY and not new.flags & Flag.EARLY:
                raise WrongAnswerError(
                    f"{n_sm} SMs: task {at} of SM {sm} ({Op(old.op).name}) no longer reads x early"
                )


def _others(answer: Answer) -> None:
    for n_sm in SIZES:
        for sm, at, new, old in _pairs(answer, n_sm):
            mine = old.op in IDLE_OPS and old.count == 0
            if replace(new, wait=0, wait_count=0, flags=0) != replace(
                old, wait=0, wait_count=0, flags=0
            ) or (not mine and (new.wait, new.wait_count) != (old.wait, old.wait_count)):
                raise WrongAnswerError(
                    f"{n_sm} SMs: task {at} of SM {sm} ({Op(old.op).name}) is changed, and it was "
                    "right"
                )


def _same_bits(answer: Answer) -> None:
    same_step(_mended(answer, 7), orders=(1,), rows=2)


def _waits_for(o_proj: str, down: str, arrivals: int = 0) -> Answer:
    """Other counters, or another number of arrivals."""

    def answer(task: Task, counters: Mapping[str, tuple[int, int]]) -> Task:
        if task.op not in IDLE_OPS or task.count:
            return task
        name = (o_proj if task.op == Op.O_PROJ else down) + str(task.layer)
        return replace(task, wait=counters[name][0], wait_count=arrivals or counters[name][1])

    return answer


def _next_layer(task: Task, counters: Mapping[str, tuple[int, int]]) -> Task:
    """They wait for the q that the SM itself writes later."""
    if task.op not in IDLE_OPS or task.count:
        return task
    name = f"qkv{task.layer + 1}"
    wait, wait_count = counters[name if name in counters else f"h{task.layer}"]
    return replace(task, wait=wait, wait_count=wait_count)


def _first_layer(task: Task, counters: Mapping[str, tuple[int, int]]) -> Task:
    """They wait for layer 0, whatever their layer."""
    if task.op not in IDLE_OPS or task.count:
        return task
    wait, wait_count = counters["merge0"]
    return replace(task, wait=wait, wait_count=wait_count)


def _not_early(task: Task, _: object) -> Task:
    return replace(task, flags=task.flags & ~Flag.EARLY)


def _all_idle(task: Task, counters: Mapping[str, tuple[int, int]]) -> Task:
    """All of O_PROJ and DOWN wait for h: for the tasks with rows of O_PROJ that is wrong."""
    if task.op not in IDLE_OPS:
        return task
    wait, wait_count = counters[f"h{task.layer}"]
    return replace(task, wait=wait, wait_count=wait_count)


_WAITS = PythonExercise(
    id="12.2",
    solution=with_waits,
    properties=(
        Property("the verifier proves the plans for 7, 9 and 11 SMs", _proved),
        Property("x is still read early", _still_early),
        Property("tasks that were right are as before", _others),
        Property("a step has the same bits", _same_bits),
    ),
    mistakes=(
        Mistake(
            lambda task, _: task,
            "nothing has changed. Which tasks have a `count` of 0, and for what do their sisters "
            "with rows wait?",
        ),
        Mistake(
            _not_early,
            "a plan that reads x after its counter is right, and gives up what reading early was "
            "for. Leave the flag, and give the SM another way to know.",
        ),
        Mistake(
            _waits_for("attention", "h"),
            "the message names who may still be using q, k and v. MERGE reads them as well, so a "
            "counter that is full before it says too little.",
        ),
        Mistake(
            _next_layer,
            "nobody may write the next q before this SM knows, and now this SM knows only when all "
            "have written it: a circle. Wait for what is over before.",
        ),
        Mistake(
            _first_layer,
            "this is right in layer 0 only. Each layer has counters of its own: `task.layer`.",
        ),
        Mistake(
            _waits_for("merge", "h", arrivals=1),
            "one arrival says that one SM is done. It takes all: `counters` has the number.",
        ),
        Mistake(
            _all_idle,
            "tasks with rows had the right wait already, and O_PROJ reads what MERGE makes.",
        ),
    ),
    then="What would be left of this fault if the verifier only knew launches that read x late?",
)

EXERCISES = (_CLOCKS, _WAITS)
