"""Check an exercise: try every property, say what holds, and recognise typical mistakes.

    check("01.1", kv_bytes)

The report is the same for the same answer, so that it can stand in a notebook and be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from mkref.errors import RequestError
from mkref.lessons.exercise import Answer, Exercise, WrongAnswerError

__all__ = ["Report", "check", "exercise", "exercises"]

MODULES = ("mkref.lessons.lesson_00", "mkref.lessons.lesson_01")


@dataclass(frozen=True)
class Report:
    """Outcome of a check.

    Attributes:
        title: exercise and name of the function.
        results: for every property its name, and what went wrong or "".
        hint: what to say about a recognised mistake; else "".
        then: what to think about next; shown when all properties hold.
    """

    title: str
    results: tuple[tuple[str, str], ...]
    hint: str
    then: str

    @property
    def passed(self) -> bool:
        """Do all properties hold?"""
        return not any(wrong for _, wrong in self.results)

    def __repr__(self) -> str:
        held = sum(not wrong for _, wrong in self.results)
        state = "solved" if self.passed else "not yet"
        lines = [f"{self.title}: {state}, {held} of {len(self.results)} properties hold"]
        common = {wrong for _, wrong in self.results}
        if len(common) == 1 and not self.passed:  # say it once
            lines.append(f"  no  in every trial {common.pop()}")
        for name, wrong in self.results if not lines[1:] else ():
            lines.append(f"  {'no' if wrong else 'ok'}  {name}" + (f" - {wrong}" if wrong else ""))
        if self.passed and self.then:
            lines.append(self.then)
        if self.hint:
            lines.append(f"Hint: {self.hint}")
        return "\n".join(lines)


@cache
def exercises() -> dict[str, Exercise]:
    """All exercises by id."""
    found = [one for module in MODULES for one in import_module(module).EXERCISES]
    return {one.id: one for one in found}


def exercise(exercise_id: str) -> Exercise:
    """One exercise.

    Raises:
        RequestError: no such exercise.
    """
    if exercise_id not in exercises():
        raise RequestError(
            f"exercise: there is no {exercise_id!r}; there are {', '.join(exercises())}"
        )
    return exercises()[exercise_id]


def check(exercise_id: str, answer: Answer) -> Report:
    """Try an answer.

    Args:
        exercise_id: which exercise, such as "01.1".
        answer: the function that the learner wrote.

    Returns:
        A report that prints itself.

    Raises:
        RequestError: no such exercise, or the answer is not a function.
    """
    task = exercise(exercise_id)
    if not callable(answer):
        raise RequestError(f"check: give the function {task.name} itself, not {answer!r}")
    results = tuple((p.name, _trial(p.trial, answer)) for p in task.properties)
    failed = any(wrong for _, wrong in results)
    return Report(
        title=f"Exercise {task.id} ({task.name})",
        results=results,
        hint=_recognise(task, answer) if failed else "",
        then=task.then,
    )


def _trial(trial: Callable[[Answer], None], answer: Answer) -> str:
    """What went wrong, or "". An error inside the answer is a finding, not a crash."""
    try:
        trial(answer)
    except WrongAnswerError as wrong:
        return str(wrong)
    except Exception as error:
        return f"it stops with {type(error).__name__}: {error}"
    return ""


def _recognise(task: Exercise, answer: Answer) -> str:
    """The hint of the mistake that gives the same results on all samples; else ""."""
    given = _results(task, answer)
    for mistake in task.mistakes:
        if None not in given and given == _results(task, mistake.answer):
            return mistake.says
    return ""


def _results(task: Exercise, answer: Answer) -> list[Any]:
    results = []
    for sample in task.samples:
        try:
            value = float(answer(*sample))
        except Exception:
            value = None
        results.append(None if value is None else float(f"{value:.9g}"))
    return results
