"""Lesson 12, exercise 12.1: what counters tell. It is the heart of the verifier in small."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from mkref.lessons.deadline import EndlessError, deadline
from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.lesson_12_wrong import Lists, own_only, popping, walk

__all__ = ["EXERCISES", "clocks"]

MOST_S = 2.0
"""Seconds that a run of an answer may take. The solution needs less than a hundredth of it."""


def clocks(lists: Lists) -> list[list[tuple[int, ...]]]:
    """What is surely finished when each task starts.

    `lists[sm]` has the tasks of one SM, in order. A task is a pair (wait, signal): the counter that
    must be full before it starts, and the counter at which it arrives when it is done; both are
    names or None. A counter is full when all tasks that signal it are done, and every counter here
    has at least one. An SM ends a task before it starts the next of its list.

    For every SM, a list with one tuple per task: how many tasks of SM 0, 1, 2, ... are surely
    finished when it starts. A task that never starts has no clock: the list of its SM is shorter.
    `lists` itself stays as it is.
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


def _bounded(answer: Answer, lists: Lists) -> Any:
    """What the answer returns; sooner than any trial must end, so that a hint can follow."""
    try:
        with deadline(MOST_S):
            return answer(lists)
    except EndlessError:
        raise WrongAnswerError(
            f"it has not returned after {MOST_S:.0f} seconds; does it wait for tasks that can "
            "never start?"
        ) from None


def _plain(said: Any) -> Any:
    """A clock as a tuple of ordinary numbers, if it is a clock at all."""
    if not isinstance(said, list | tuple):
        return said
    return tuple(int(k) if isinstance(k, np.integer) else k for k in said)


def _checked(answer: Answer, lists: Lists, where: str) -> None:
    handed = [list(tasks) for tasks in lists]
    given, right = _bounded(answer, handed), clocks(lists)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, list | tuple) or len(given) != len(lists):
        raise WrongAnswerError(f"{where}: it returns {given!r:.60}, and not {len(lists)} lists")
    for sm, theirs in enumerate(given):
        if not isinstance(theirs, list | tuple):
            raise WrongAnswerError(f"{where}: for SM {sm} it gives {theirs!r:.60}, and not a list")
        if len({id(clock) for clock in theirs if isinstance(clock, list)}) < sum(
            isinstance(clock, list) for clock in theirs
        ):
            raise WrongAnswerError(
                f"{where}: clocks of SM {sm} are one and the same list, which went on changing "
                "after it was stored; store a copy, such as tuple(clock)"
            )
    said = [[_plain(clock) for clock in theirs] for theirs in given]
    n_wrong = sum(
        known != clock
        for mine, theirs in zip(right, said, strict=True)
        for known, clock in zip(mine, theirs, strict=False)
    )
    for sm, (mine, theirs) in enumerate(zip(right, said, strict=True)):
        for at, (known, clock) in enumerate(zip(mine, theirs, strict=False)):
            if known != clock:
                raise WrongAnswerError(
                    f"{where}: task {at} of SM {sm} knows {known}, it says {clock!r:.60}; "
                    f"wrong clocks in all: {n_wrong}"
                )
        if len(mine) < len(theirs) and not any(theirs[len(mine) :]):
            raise WrongAnswerError(
                f"{where}: task {len(mine)} of SM {sm} never starts, so it has no clock: leave it "
                f"out, do not give {theirs[-1]!r:.60}"
            )
        if len(mine) != len(theirs):
            raise WrongAnswerError(
                f"{where}: {len(mine)} tasks of SM {sm} ever start, it gives {len(theirs)} clocks"
            )
    if handed != [list(tasks) for tasks in lists]:
        raise WrongAnswerError(f"{where}: it changes the lists that it is given; copy them first")


ALONE: Lists = [[(None, None)] * 3, [(None, None)] * 2]
MESSAGE: Lists = [[("a", None), (None, None)], [(None, None), (None, "a"), (None, None)]]
RELAY: Lists = [[("b", None)], [("a", "b")], [(None, None), (None, "a")]]
TWO: Lists = [[(None, "a")], [(None, None), (None, "a")], [("a", None)], [(None, None), ("a", "b")]]
CIRCLE: Lists = [[(None, "a"), ("c", "b")], [("b", "c"), (None, None)], [("a", None), ("c", None)]]
ITSELF: Lists = [[(None, "a")], [("a", None), (None, "a")]]
TWICE: Lists = [[("a", None)], [(None, "a"), ("b", "a")], [(None, "b")]]
LONG: Lists = [
    [(f"ping{i}", f"pong{i}") for i in range(5)],
    [(f"pong{i - 1}" if i else None, f"ping{i}") for i in range(5)],
]


def _case(lists: Lists, where: str) -> Callable[[Answer], None]:
    return lambda answer: _checked(answer, lists, where)


def _circles(answer: Answer) -> None:
    try:
        _checked(answer, CIRCLE, "SM 0 and SM 1 in a circle")
    except (AssertionError, RuntimeError, ValueError) as error:
        raise WrongAnswerError(
            f"it stops with {type(error).__name__}: {error}. A circle is no error here: return "
            "the clocks of those tasks that start"
        ) from error
    _checked(answer, ITSELF, "SM 1 waits for a counter that it signals itself, later")


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


_CLOCKS = PythonExercise(
    id="12.1",
    solution=clocks,
    properties=(
        Property("without counters an SM knows only itself", _case(ALONE, "two SMs, no counters")),
        Property("a counter tells what its signaller has done", _case(MESSAGE, "one message")),
        Property("and what its signaller knew", _case(RELAY, "SM 2 tells SM 1, SM 1 tells SM 0")),
        Property("a counter is full when all have arrived", _case(TWO, "two signal one counter")),
        Property("also those of one SM", _case(TWICE, "SM 1 signals a counter twice")),
        Property("as many rounds as it takes", _case(LONG, "two SMs, five messages each way")),
        Property("tasks in a circle have no clock", _circles),
        Property("twenty random lists", _drawn),
    ),
    mistakes=(
        Mistake(
            lambda lists: walk(lists, all_seen=True),
            "this is what *had* finished in the order in which you happened to run the tasks. In "
            "another order it is different. What does the task know because a counter told it?",
        ),
        Mistake(
            lambda lists: walk(lists, deep=False),
            "a signaller passes on more than its own tasks: whatever it knew is finished, too.",
        ),
        Mistake(
            lambda lists: walk(lists, learns=False),
            "every SM counts its own tasks, and learns nothing from a counter for which it has "
            "waited. Who has signalled it, and what had they done by then?",
        ),
        Mistake(
            lambda lists: walk(lists, stores_first=True),
            "the SM does learn, but one line too late: the clock of a task is stored before the "
            "task has learnt from its counter.",
        ),
        Mistake(
            lambda lists: walk(lists, keeps=False),
            "what the counter tells replaces what the SM knew itself. Both are true: take the "
            "maximum of the SM's list and the counter's.",
        ),
        Mistake(
            lambda lists: walk(lists, merge=operator.add),
            "added up, the same task is counted again by each who knows of it. Five finished and "
            "three finished are not eight: which number is surely right of both?",
        ),
        Mistake(
            lambda lists: walk(lists, merge=min),
            "the smaller number forgets. Who told the larger one was sure of it, so it holds.",
        ),
        Mistake(
            lambda lists: walk(lists, counts=False),
            "no SM ever counts a task of its own, so nobody has anything to tell.",
        ),
        Mistake(
            lambda lists: walk(lists, copies=False),
            "a counter's list and an SM's are one and the same list, so what the SM does *after* "
            "its arrival is told as well. The counter needs a copy.",
        ),
        Mistake(
            own_only,
            "these are numbers of the tasks in each list. Nobody has waited for anybody: play a "
            "run, in which a task starts only when its counter is full, and learn from the "
            "counter.",
        ),
        Mistake(
            lambda lists: walk(lists, joins=False),
            "the last arrival overwrites what the others told. Who waits for all may conclude "
            "from all: take the maximum, number by number.",
        ),
        Mistake(
            lambda lists: walk(lists, full="first"),
            "this goes on after the first arrival. The counter is full when *all* tasks that "
            "signal it are done.",
        ),
        Mistake(
            lambda lists: walk(lists, counts_itself=False),
            "the arrival comes when the task is done, so it tells of the task itself, too.",
        ),
        Mistake(
            lambda lists: walk(lists, rounds=1),
            "one pass over the SMs is not enough: SM 0 may wait for SM 2. When is it certain that "
            "nobody can go on?",
        ),
        Mistake(
            lambda lists: walk(lists, rounds=len(lists)),
            "a fixed number of rounds is not enough: two SMs can send each other any number of "
            "messages. Go on as long as a round has done a task.",
        ),
        Mistake(
            lambda lists: walk(lists, until_done=True),
            "this goes on until *all* tasks are done, and in a circle they never are. Stop when "
            "a whole round has done no task.",
        ),
        Mistake(
            lambda lists: walk(lists, full="others"),
            "a counter needs the waiter's own signals as well. If they come later in its list, it "
            "waits for itself: the smallest circle, as MERGE before ATTENTION above.",
        ),
        Mistake(
            lambda lists: walk(lists, full="each"),
            "one SM may signal a counter with several tasks. Count tasks, not SMs.",
        ),
        Mistake(
            lambda lists: walk(lists, skips=True),
            "an SM does not pass by a task that waits: what stands behind it in the list waits, "
            "too.",
        ),
        Mistake(
            popping,
            "the clocks are right, and the caller's lists are used up. Go over them with an index, "
            "or over a copy.",
        ),
    ),
    then="Now find the same lines in `mkref/plan/clocks.py`: `learn` and `work`.",
)

EXERCISES = (_CLOCKS,)
