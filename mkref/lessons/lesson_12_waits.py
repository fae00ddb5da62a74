"""Lesson 12, exercise 12.2: the waits of tasks that have nothing to do.

A fault that this repository had: the learner mends a plan, and the verifier says whether it is
right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, replace
from typing import TYPE_CHECKING, Any

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

__all__ = ["EXERCISES", "IDLE_OPS", "with_waits", "without_waits"]

IDLE_OPS = (Op.O_PROJ, Op.DOWN)
"""Operations of which an SM may have no rows, and yet must wait for their inputs."""
SIZES = (7, 9, 11)
"""SMs of the plans that are mended: more than DOWN has row blocks."""


def with_waits(task: Task, counters: Mapping[str, tuple[int, int]]) -> Task:
    """The task as it must be in the plan.

    Of O_PROJ and DOWN, the tasks without rows (`task.count` is 0) have lost their waits. All other
    tasks are right and come back as they are. `counters` says for a name which number the counter
    has and how many arrivals fill it, as a pair. The names of layer 3 are "router3", "qkv3",
    "attention3", "merge3", "h3" and "out3". The words of a task are `task.op`, `task.layer`,
    `task.wait` and `task.wait_count`; a task cannot be changed, `replace` of `dataclasses` makes
    another one.
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


class _Counters(dict[str, tuple[int, int]]):
    """Number and arrivals by name; a name that does not exist is told with those that do."""

    def __missing__(self, name: object) -> tuple[int, int]:
        layer = "".join(filter(str.isdigit, str(name))) or "3"
        layers = {one: one.strip("abcdefghijklmnopqrstuvwxyz") for one in self}
        own = [one for one in self if layers[one] == layer]
        there_are = f"of layer {layer} there are {', '.join(own)}"
        if not own:
            there_are = f"the last layer is {max(int(of) for of in layers.values() if of)}"
        elif f"router{layer}" not in own:
            there_are += " (it is dense, so it has no router)"
        raise WrongAnswerError(f"there is no counter {name!r:.40}; {there_are}")


def _mended(answer: Answer, n_sm: int) -> Plan:
    """The plan with the tasks of the answer."""
    plan = without_waits(n_sm)
    counters = {c.name: (i, c.target) for i, c in enumerate(plan.counters)}
    given = {}
    for sm, at, task in plan:
        try:
            given[sm, at] = answer(task, _Counters(counters))
        except FrozenInstanceError as error:
            raise WrongAnswerError(
                f"{error}: a task cannot be changed. Return another one, "
                "replace(task, wait=..., wait_count=...), with `from dataclasses import replace`"
            ) from error
    if all(one is None for one in given.values()):
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    return replace(
        plan,
        tasks=tuple(
            tuple(
                _task(given[sm, at], f"{n_sm} SMs: task {at} of SM {sm}", task)
                for at, task in enumerate(tasks)
            )
            for sm, tasks in enumerate(plan.tasks)
        ),
    )


def _pairs(answer: Answer, n_sm: int) -> Iterator[tuple[int, int, Task, Task]]:
    """SM, position, the task of the answer and the task of a right plan."""
    for (sm, at, new), (_, _, old) in zip(_mended(answer, n_sm), lesson_plan(n_sm), strict=True):
        yield sm, at, new, old


def _task(given: Any, where: str, old: Task) -> Task:
    if given is None:
        raise WrongAnswerError(
            f"{where} ({Op(old.op).name} with {old.count} rows): it returns None; tasks that were "
            "right come back as they are, with `return task`"
        )
    if not isinstance(given, Task):
        raise WrongAnswerError(f"{where}: it returns {given!r:.60}, which is no task")
    return given


def _proved(answer: Answer) -> None:
    for n_sm in SIZES:
        proved(_mended(answer, n_sm))


def _still_early(answer: Answer) -> None:
    for n_sm in SIZES:
        numbers = {counter.name: i for i, counter in enumerate(lesson_plan(n_sm).counters)}
        outs = [i for name, i in numbers.items() if name.startswith("out")]
        for sm, at, new, old in _pairs(answer, n_sm):
            if old.flags & Flag.EARLY and not new.flags & Flag.EARLY:
                raise WrongAnswerError(
                    f"{n_sm} SMs: task {at} of SM {sm} ({Op(old.op).name}) no longer reads x early"
                )
            if (old.op, old.count) in {(op, 0) for op in IDLE_OPS} and new.wait == outs[old.layer]:
                raise WrongAnswerError(
                    f"{n_sm} SMs: task {at} of SM {sm} ({Op(old.op).name}) waits for "
                    f"'out{old.layer}', the counter of the next x: what follows in its list comes "
                    "after that counter's release, so it cannot read x early any more"
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


def _waits_for(o_proj: str, down: str, arrivals: int = 0, more: int = 0) -> Answer:
    """Other counters, another number of arrivals, or some more."""

    def answer(task: Task, counters: Mapping[str, tuple[int, int]]) -> Task:
        if task.op not in IDLE_OPS or task.count:
            return task
        name = (o_proj if task.op == Op.O_PROJ else down) + str(task.layer)
        wait, wait_count = counters[name]
        return replace(task, wait=wait, wait_count=(arrivals or wait_count) + more)

    return answer


def _two_words(*, swapped: bool) -> Answer:
    """The pair the wrong way round, or its first half only."""

    def answer(task: Task, counters: Mapping[str, tuple[int, int]]) -> Task:
        if task.op not in IDLE_OPS or task.count:
            return task
        wait, wait_count = counters[f"{'merge' if task.op == Op.O_PROJ else 'h'}{task.layer}"]
        if swapped:
            return replace(task, wait=wait_count, wait_count=wait)
        return replace(task, wait=wait)

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
            "another layer's counter was full long ago. Each layer has counters of its own: take "
            "that of `task.layer`.",
        ),
        Mistake(
            _waits_for("merge", "h", arrivals=1),
            "one arrival says that one SM is done. It takes all: `counters` has the number.",
        ),
        Mistake(
            _waits_for("merge", "out"),
            "`out` is right for the order, and too late: it is the counter of x itself, behind the "
            "release that reading early was to save. What must be over is known before.",
        ),
        Mistake(
            _two_words(swapped=True),
            "the pair is the wrong way round: first the number of the counter, for `wait`, then "
            "its arrivals, for `wait_count`.",
        ),
        Mistake(
            _two_words(swapped=False),
            "a wait has two words. With `wait_count` still 0 it is over before anybody arrives.",
        ),
        Mistake(
            _waits_for("merge", "h", more=-1),
            "one arrival too few: the last one may be just that which matters. Take the number as "
            "`counters` gives it.",
        ),
        Mistake(
            _waits_for("merge", "h", more=1),
            "one arrival too many never comes. Take the number as `counters` gives it.",
        ),
        Mistake(
            _all_idle,
            "tasks with rows had the right wait already, and O_PROJ reads what MERGE makes.",
        ),
    ),
    then="What would be left of this fault if the verifier only knew launches that read x late?",
)

EXERCISES = (_WAITS,)
