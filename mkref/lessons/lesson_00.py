"""Exercise of lesson 00: how much of the machine waits, from the tasks of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from mkref.lessons.exercise import (
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
    expect,
)

__all__ = ["EXERCISES", "waiting_share"]


def waiting_share(tasks: Sequence[Any], n_sm: int) -> float:
    """The part of the machine's time, 0 to 1, in which SMs wait for inputs.

    Each task has the times `begin` (its SM looks at it), `ready` (its inputs are
    there) and `end` (its outputs are there), counted from the start of the step.
    The machine's time is that of all `n_sm` SMs, from 0 to the end of the last task.
    """
    # BEGIN SOLUTION
    waited = sum(task.ready - task.begin for task in tasks)
    span = max(task.end for task in tasks)
    return waited / (n_sm * span)
    # END SOLUTION


def _task(begin: int, ready: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(begin=begin, ready=ready, end=end)


# Two SMs; the first works 0..60 and 90..100, the second waits 0..30, works to 80, and has finished.
_TWO = ([_task(0, 0, 60), _task(60, 90, 100), _task(0, 30, 80)], 2)
_BUSY = ([_task(0, 0, 50), _task(50, 50, 80), _task(0, 0, 70)], 2)
_ODD = (
    [_task(3, 10, 31), _task(33, 40, 47), _task(0, 5, 20), _task(22, 44, 53), _task(1, 2, 9)],
    3,
)
_GAPS = ([_task(10, 20, 30), _task(50, 60, 90)], 1)


def _waited(tasks: Sequence[Any]) -> float:
    return float(sum(task.ready - task.begin for task in tasks))


def _worked(tasks: Sequence[Any]) -> float:
    return float(sum(task.end - task.ready for task in tasks))


def _span(tasks: Sequence[Any]) -> float:
    return float(max(task.end for task in tasks))


def _right(sample: tuple[list[SimpleNamespace], int], where: str) -> Callable[[Answer], None]:
    tasks, n_sm = sample

    def trial(answer: Answer) -> None:
        right = _waited(tasks) / (n_sm * _span(tasks))
        got = answer(tasks, n_sm)
        if right == 0 and got is not None and not got == 0:
            raise WrongAnswerError(f"{where}: 0 is right, it returns {got!r}")
        expect(right, got, where, tolerance=1e-9)

    return trial


def _order(answer: Answer) -> None:
    """The order of the list does not matter."""
    tasks, n_sm = _ODD
    right = _waited(tasks) / (n_sm * _span(tasks))
    expect(right, answer(tasks[::-1], n_sm), "the same tasks backwards", tolerance=1e-9)


MISTAKES = (
    Mistake(
        lambda tasks, n_sm: _waited(tasks) / _span(tasks),
        "this divides by the time of one SM. All n_sm of them could have worked.",
    ),
    Mistake(
        lambda tasks, n_sm: _waited(tasks) / (_waited(tasks) + _worked(tasks)),
        "this leaves out the time that an SM spends outside of any task.",
    ),
    Mistake(
        lambda tasks, n_sm: _worked(tasks) / (n_sm * _span(tasks)),
        "this is the share of work. Waiting ends when a task is ready.",
    ),
    Mistake(
        lambda tasks, n_sm: 1 - _worked(tasks) / (n_sm * _span(tasks)),
        "this also counts an SM that has nothing left to do. Waiting is from begin to ready.",
    ),
    Mistake(
        lambda tasks, n_sm: _waited(tasks),
        "this is a time. A share is a part of the time of the whole machine.",
    ),
    Mistake(
        lambda tasks, n_sm: 100 * _waited(tasks) / (n_sm * _span(tasks)),
        "this is in percent. A share is between 0 and 1.",
    ),
    Mistake(
        lambda tasks, n_sm: _waited(tasks) / (n_sm * tasks[-1].end),
        "the last task of the list need not be the last to end: the list goes SM after SM.",
    ),
    Mistake(
        lambda tasks, n_sm: _waited(tasks) / (n_sm * (_span(tasks) - min(t.begin for t in tasks))),
        "the step begins at 0, not when the first of these tasks begins.",
    ),
    Mistake(
        lambda tasks, n_sm: (
            sum((t.ready - t.begin) / (t.end - t.begin) for t in tasks) / len(tasks)
        ),
        "a mean of the tasks' own shares lets a short task count as much as a long one. Add up "
        "times first, and divide once.",
    ),
)

EXERCISES = (
    PythonExercise(
        id="00.1",
        solution=waiting_share,
        properties=(
            Property("two SMs", _right(_TWO, "waits of 30 and 30 in 2 x 100")),
            Property("nobody waits", _right(_BUSY, "every task begins ready")),
            Property("odd numbers on three SMs", _right(_ODD, "five tasks on three SMs")),
            Property(
                "gaps between tasks are no waiting", _right(_GAPS, "waits of 10 and 10 in 90")
            ),
            Property("the order of the tasks does not matter", _order),
        ),
        mistakes=MISTAKES,
        samples=(_TWO, _ODD, _GAPS),
        then="Now try it on the recorded trace: waiting_share(list(trace), trace.n_sm).",
    ),
)
