"""Lesson 12, exercise 12.1: what counters tell. It is the heart of the verifier in small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)

__all__ = ["EXERCISES", "clocks"]

Lists = Sequence[Sequence[tuple[str | None, str | None]]]


def clocks(lists: Lists) -> list[list[tuple[int, ...]]]:
    """What is surely finished when each task starts.

    `lists[sm]` has the tasks of one SM, in order. A task is a pair (wait, signal): the counter that
    must be full before it starts, and the counter at which it arrives when it is done; both are
    names or None. A counter is full when all tasks that signal it are done. An SM ends a task
    before it starts the next of its list.

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
        if len({id(clock) for clock in theirs if isinstance(clock, list)}) < sum(
            isinstance(clock, list) for clock in theirs
        ):
            raise WrongAnswerError(
                f"{where}: clocks of SM {sm} are one and the same list, which went on changing "
                "after it was stored; store a copy, such as tuple(clock)"
            )
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
    counts_itself: bool = True, again: bool = True, all_seen: bool = False, learns: bool = True,
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
                if wait is not None and wait in told and learns:
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


def _own_only(lists: Lists) -> list[list[tuple[int, ...]]]:
    """No run: every task knows of those before it in its list, and of nothing else."""
    n = len(lists)
    return [
        [tuple(at if i == sm else 0 for i in range(n)) for at in range(len(tasks))]
        for sm, tasks in enumerate(lists)
    ]


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
            lambda lists: _walk(lists, learns=False),
            "every SM counts its own tasks, and learns nothing from a counter for which it has "
            "waited. Who has signalled it, and what had they done by then?",
        ),
        Mistake(
            _own_only,
            "these are numbers of the tasks in each list. Nobody has waited for anybody: play a "
            "run, in which a task starts only when its counter is full, and learn from the "
            "counter.",
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

EXERCISES = (_CLOCKS,)
