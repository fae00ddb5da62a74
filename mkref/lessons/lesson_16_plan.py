"""Lesson 16: its exercise on plans, the two tasks of the shared expert in the lists of the SMs.

An answer's tasks take the place of the port's own; the port's verifier says whether they are right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from numbers import Integral
from typing import TYPE_CHECKING, Any

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.lesson_16 import NEW, shared_port, violation
from mkref.lessons.lesson_16_wrong import MISTAKES, changed
from mkref.plan.task import NO_COUNTER, Flag, Op

if TYPE_CHECKING:
    from mkref.plan.task import Task

__all__ = ["EXERCISES", "verdict", "with_shared"]


def with_shared(
    tasks: Sequence[Task],
    sm: int,
    n_sm: int,
    up: Task,
    down: Task,
    n_up: int,
    n_down: int,
    counters: Mapping[str, int],
) -> list[Task]:
    """The tasks of one layer on SM `sm` of `n_sm`, with those of the shared expert among them.

    `tasks` is the SM's list without them, in order. `up` (SHARED_UP) and `down` (SHARED_DOWN) know
    their weights; give them their share (`first`, `count`), the counter that they wait for (`wait`)
    and the one at which they arrive (`signal`), with `dataclasses.replace`, and put each in its
    place. SHARED_UP has `n_up` granules on all SMs together, SHARED_DOWN `n_down` row blocks; the
    row blocks of an SM are those that its O_PROJ and DOWN have. Where an SM has no share of a new
    task, it gets none: a new task has a `count` of at least 1. (O_PROJ and DOWN of such an SM are
    in `tasks` with a count of 0, for the sake of their waits. They stay.) `counters` has the
    numbers of the counters "x", "qkv", "attention", "merge", "h" and "h_shared" of this layer; as
    many arrivals as there are signals are waited for.
    """
    # BEGIN SOLUTION
    from dataclasses import replace

    from mkref.plan import Op
    from mkref.plan.share import share

    begin, end = share(n_up, n_sm, sm)
    up = replace(up, first=begin, count=end - begin)
    up = replace(up, wait=counters["x"], signal=counters["h_shared"])
    begin, end = share(n_down, n_sm, sm)  # as O_PROJ and DOWN: x_mid stays on this SM
    down = replace(down, first=begin, count=end - begin, wait=counters["h_shared"])
    out = []
    for task in tasks:
        if task.op == Op.ATTENTION and up.count:  # while others still compute their q
            out.append(up)
        if task.op == Op.DOWN and down.count:
            out.append(down)
        out.append(task)
    return out
    # END SOLUTION


# ---- 16.3


def _entered(answer: Answer, n_sm: int) -> Any:
    """The port's plan with the answer's tasks in the place of its own."""
    port = shared_port()
    plan, build = port.module("lessons.steps").lesson_plan(n_sm), port.module("plan.build")
    row_blocks, kinds = port.module("plan.effects").row_blocks, port.module("plan").Op
    names = [counter.name for counter in plan.counters]
    lists: list[list[Any]] = [[] for _ in range(n_sm)]
    models = {(t.op, t.layer): t for _, _, t in plan if kinds(t.op).name in NEW}
    for layer in range(plan.config.num_hidden_layers + 1):
        given = {
            name: names.index(f"{name}{layer}") for name in COUNTERS if f"{name}{layer}" in names
        }
        given["x"] = names.index("x0" if not layer else f"out{layer - 1}")
        for sm, tasks in enumerate(plan.tasks):
            old = [t for t in tasks if t.layer == layer and kinds(t.op).name not in NEW]
            if (kinds.SHARED_UP, layer) not in models:
                lists[sm] += old
                continue
            up, down = (
                replace(models[kinds[name], layer], first=0, count=0, **NOWHERE) for name in NEW
            )
            sizes = (row_blocks(plan.config, task.op) for task in (up, down))
            new = answer([*old], sm, n_sm, up, down, *sizes, dict(given))
            lists[sm] += _tasks(new, type(up), f"SM {sm} of {n_sm}, layer {layer}", old)
    return _counted(plan, lists, build)


COUNTERS = ("qkv", "attention", "merge", "h", "h_shared")
NOWHERE = {"wait": NO_COUNTER, "wait_count": 0, "signal": NO_COUNTER}


def _tasks(given: Any, kind: type, where: str, old: Sequence[Any]) -> list[Any]:
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, list | tuple) or not all(isinstance(task, kind) for task in given):
        raise WrongAnswerError(f"{where}: it returns {given!r:.60}, which is no list of tasks")
    kept = [task for task in given if task.op <= Op.SAMPLE]
    if kept != [*old]:
        gone = [task for task in old if task not in kept]
        if gone and not any(task.count for task in gone):
            names = " and ".join(Op(task.op).name for task in gone)
            raise WrongAnswerError(f"{where}: {names}, which had a count of 0 here, must stay")
        raise WrongAnswerError(f"{where}: the tasks that were there are changed, or in other order")
    for task in (task for task in given if task.op > Op.SAMPLE):
        _sensible(task, where, old)
    return [*given]


def _sensible(task: Any, where: str, old: Sequence[Any]) -> None:
    """A new task is made of numbers, has a share, and keeps x_mid on its SM."""
    name = f"{where}: {shared_port().module('plan').Op(task.op).name}"
    for word in ("first", "count", "wait", "signal"):
        value = getattr(task, word)
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise WrongAnswerError(f"{name} has the {word} {value!r}, which is no number")
    if task.count < 1:
        raise WrongAnswerError(f"{name} has a count of {task.count}; at least 1 is needed")
    down = next((one for one in old if one.op == Op.DOWN), None)
    if "SHARED_DOWN" in name and down is not None:
        mine, its = ((one.first, one.first + one.count - 1) for one in (task, down))
        if mine != its:
            rows = f"{its[0]} to {its[1]}" if down.count else "none"
            raise WrongAnswerError(
                f"{name} has the row blocks {mine[0]} to {mine[1]}; DOWN of this SM has {rows}"
            )


def _counted(plan: Any, lists: Sequence[Sequence[Any]], build: Any) -> Any:
    """The plan with these lists: arrivals counted, flags of what is last set anew."""
    last = ~(Flag.RELEASE | Flag.LAST_OF_LAYER)
    lists = [build._mark_last([replace(t, flags=t.flags & last) for t in ts]) for ts in lists]
    signals = [task.signal for tasks in lists for task in tasks]
    arrivals = [signals.count(number) for number in range(len(plan.counters))]

    def aim(task: Any) -> Any:
        good = 0 <= task.wait < len(arrivals)
        return replace(task, wait_count=arrivals[task.wait] if good else 0)

    counters = (replace(c, target=n) for c, n in zip(plan.counters, arrivals, strict=True))
    return replace(
        plan, tasks=tuple(tuple(map(aim, tasks)) for tasks in lists), counters=tuple(counters)
    )


@cache
def _violation(plan: Any) -> str:
    return violation(plan)


def verdict(*, up_before: Op = Op.ATTENTION, down_waits: bool = True, n_sm: int = 3) -> str:
    """What the verifier says of the port with SHARED_UP elsewhere, or without a wait; in words.

    Args:
        up_before: SHARED_UP stands before the first task of this operation.
        down_waits: SHARED_DOWN waits for h_shared.
        n_sm: of the plan.
    """
    down = None if down_waits else {"wait": ""}
    said = _violation(_entered(changed(up_before=up_before, down=down), n_sm))
    text = said.replace(": SM", ":\n  SM").replace(" without", "\n  without")
    return text or "no violation"


def _proved(*sizes: int) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        for n_sm in sizes:
            if wrong := _violation(_entered(answer, n_sm)):
                said = f"{n_sm} SM{'s' * (n_sm > 1)}, the verifier says: {_named(wrong)}"
                raise WrongAnswerError(said)

    return trial


def _named(text: str) -> str:
    """With the name that an answer knows x by, and without a flag that it does not know."""
    if "Flag.EARLY" in text:
        text = text.partition(": waits for")[0] + ": " + ONLY_DOWN
    return re.sub(r"'out\d+'", lambda found: f"{found[0]} (which is `x` here)", text)


ONLY_DOWN = (
    "it reads x as soon as DOWN has announced it, before DOWN's signal. So no other task may "
    "arrive at the counter of x"
)


def _new_tasks(plan: Any) -> list[tuple[int, int, Any, str]]:
    """SM, place in its list, task and operation of what is new."""
    kinds = shared_port().module("plan").Op
    return [(sm, i, t, kinds(t.op).name) for sm, i, t in plan if kinds(t.op).name in NEW]


def _no_longer(answer: Answer) -> None:
    """SHARED_UP waits for what it reads and for nothing that comes later; nor does SHARED_DOWN."""
    plan = _entered(answer, 3)
    if not _new_tasks(plan):
        raise WrongAnswerError("3 SMs: there is no new task")
    for sm, _, task, name in _new_tasks(plan):
        waits = _counter(plan, task.wait)
        x = "x0" if not task.layer else f"out{task.layer - 1}"
        late = waits != x if name == "SHARED_UP" else waits == f"h{task.layer}"
        if late:
            needs = x if name == "SHARED_UP" else f"h_shared{task.layer}"
            raise WrongAnswerError(
                _named(
                    f"SM {sm}: {name} of layer {task.layer} waits for {waits!r}; what it reads is "
                    f"there when {needs!r} is full"
                )
            )
        if name == "SHARED_DOWN" and task.signal != NO_COUNTER:
            raise WrongAnswerError(
                f"SM {sm}: SHARED_DOWN of layer {task.layer} arrives at "
                f"{_counter(plan, task.signal)!r}, so whoever waits for that waits for every "
                "SHARED_DOWN as well"
            )


def _counter(plan: Any, number: int) -> str:
    return str(plan.counters[number].name) if number != NO_COUNTER else "nothing"


def _moved(answer: Answer) -> Answer:
    """The answer, after somebody has moved its SHARED_UP behind GATE_UP."""

    def late(tasks: Sequence[Task], *rest: Any) -> Any:
        given = answer(tasks, *rest)
        if not isinstance(given, list | tuple):
            return given
        ups = [task for task in given if task.op == rest[2].op]
        others = [task for task in given if task not in ups]
        at = next((i for i, task in enumerate(others) if task.op == Op.O_PROJ), len(others))
        return [*others[:at], *ups, *others[at:]]

    return late


def _robust(answer: Answer) -> None:
    """Every wait is there that the tasks need, wherever they stand."""
    if _violation(_entered(answer, 3)):
        raise WrongAnswerError("3 SMs: not moved, since it is not proved as it is")
    if wrong := _violation(_entered(_moved(answer), 3)):
        raise WrongAnswerError(f"3 SMs, SHARED_UP moved, the verifier says: {_named(wrong)}")


def _early(answer: Answer) -> None:
    """SHARED_UP stands where its SM would wait for the others' q."""
    plan = _entered(answer, 3)
    places = [(sm, at, task) for sm, at, task, name in _new_tasks(plan) if name == "SHARED_UP"]
    if not places:
        raise WrongAnswerError("3 SMs: there is no SHARED_UP")
    for sm, at, task in places:
        before = [t.op for t in plan.tasks[sm][:at] if t.layer == task.layer]
        if Op.ATTENTION in before or Op.QKV not in before:
            side = "behind ATTENTION" if Op.ATTENTION in before else "before QKV"
            raise WrongAnswerError(f"SM {sm}: SHARED_UP of layer {task.layer} stands {side}")


def _same_bits(answer: Answer) -> None:
    plan = _entered(answer, 4)
    if _violation(plan):
        raise WrongAnswerError("4 SMs: not run, since it is not proved")
    shared_port().module("lessons.steps").same_step(plan, orders=(1,), rows=2)


EXERCISES = (
    PythonExercise(
        id="16.3",
        solution=with_shared,
        properties=(
            Property("the verifier proves the plan for one SM", _proved(1)),
            Property("and for 2, 4 and 7 SMs", _proved(2, 4, 7)),
            Property("both wait for what they read, and for nothing later", _no_longer),
            Property("SHARED_UP stands behind QKV, before ATTENTION", _early),
            Property("it is still proved if SHARED_UP moves behind GATE_UP", _robust),
            Property("a step has the same bits", _same_bits),
        ),
        mistakes=MISTAKES,
        then="Now count: how many waits has a layer of this SM, and how many of them are new?",
    ),
)
