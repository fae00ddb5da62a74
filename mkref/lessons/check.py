"""Check an exercise: try every property, say what holds, and recognise typical mistakes.

    check("01.1", kv_bytes)

The report is the same for the same answer, so that it can stand in a notebook and be compared.
A solved exercise is noted in the learner's own progress file (`mkref.lessons.progress_file`).
Exercises are found, not listed: every module `mkref/lessons/lesson_NN*.py` may have a tuple
`EXERCISES`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import mkref.lessons
from mkref.errors import RequestError
from mkref.lessons.progress_note import note_exercise

if TYPE_CHECKING:
    from mkref.lessons.exercise import Exercise, Results

__all__ = ["Report", "check", "exercise", "exercises", "lesson_modules"]


@dataclass(frozen=True)
class Report:
    """Outcome of a check.

    Attributes:
        title: exercise and name of the answer.
        results: for every property its name, and what went wrong or "".
        hint: what to say about a recognised mistake; else "".
        then: what to think about next; shown when all properties hold.
    """

    title: str
    results: Results
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


def lesson_modules() -> list[str]:
    """Names of the modules of all lessons, in order."""
    found = (module.name for module in iter_modules(mkref.lessons.__path__))
    return sorted(name for name in found if re.fullmatch(r"lesson_\d\d(_\w+)?", name))


@cache
def exercises(lesson: str = "") -> dict[str, Exercise]:
    """Exercises by id.

    Args:
        lesson: such as "03": those of one lesson, without importing the others; "" is all.

    Raises:
        RequestError: two exercises have the same id, or a module has one of another lesson.
    """
    found: dict[str, Exercise] = {}
    for name in lesson_modules():
        if not name.startswith(f"lesson_{lesson}"):
            continue
        for one in getattr(import_module(f"mkref.lessons.{name}"), "EXERCISES", ()):
            if one.id in found or not one.id.startswith(f"{name[7:9]}."):
                raise RequestError(f"exercise: {name} has {one.id!r}, taken, or not its own")
            found[one.id] = one
    return dict(sorted(found.items()))


def exercise(exercise_id: str) -> Exercise:
    """One exercise.

    Raises:
        RequestError: no such exercise.
    """
    found = exercises(str(exercise_id)[:2]).get(exercise_id)
    if found is None:
        raise RequestError(
            f"exercise: there is no {exercise_id!r}; there are {', '.join(exercises())}"
        )
    return found


def check(exercise_id: str, answer: Any) -> Report:
    """Try an answer.

    Args:
        exercise_id: which exercise, such as "01.1".
        answer: what the learner's cell defines: a function, or CUDA source text.

    Returns:
        A report that prints itself.

    Raises:
        RequestError: no such exercise, or the answer is not what it asks for.
    """
    task = exercise(exercise_id)
    results, hint = task.judge(answer)
    report = Report(
        title=f"Exercise {task.id} ({task.name})", results=results, hint=hint, then=task.then
    )
    if report.passed:
        note_exercise(task)
    return report
