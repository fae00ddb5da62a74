"""The lessons that there are, each with what the learner's file says of it.

Exercises come from `mkref.lessons.check`, titles and questions from the notebooks. Without the
notebooks (mkref was installed, not checked out) a lesson has no title.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mkref.jsonfile import read_json
from mkref.lessons.check import exercises
from mkref.lessons.recorded import CHECKOUT

if TYPE_CHECKING:
    from mkref.lessons.progress_file import Guess, Kept

__all__ = ["EARLIER", "OPEN", "SOLVED", "Lesson", "off_by", "table"]

NEAR = 1.1
OPEN, SOLVED, EARLIER = "open", "solved", "solved in an earlier edition"


@dataclass(frozen=True)
class Lesson:
    """One lesson and what the learner has done in it.

    Attributes:
        number, title: such as "01" and "speed of light".
        file: name of the notebook; "" if it is not here.
        exercises: state by id.
        guesses: prediction by question; None where there is none.
    """

    number: str
    title: str
    file: str
    exercises: dict[str, str]
    guesses: dict[str, Guess | None]

    @property
    def done(self) -> bool:
        """Is no exercise open?"""
        return OPEN not in self.exercises.values()

    def cells(self) -> tuple[str, str, str]:
        """Its row of the table."""
        marks = {OPEN: "-", SOLVED: "{}", EARLIER: "{}*"}
        tasks = (marks[state].format(one[3:]) for one, state in self.exercises.items())
        guesses = (f"{one[3:]} {off_by(made)}" for one, made in self.guesses.items())
        return f"{self.number} {self.title}", " ".join(tasks), ", ".join(guesses)


def off_by(guess: Guess | None) -> str:
    """How far a prediction was off, in a word.

    >>> from mkref.lessons.progress_file import Guess
    >>> [off_by(Guess(said, 40.0, "ms", "")) for said in (40.0, 43.0, 120.0, -1.0)]
    ['right', 'near', 'x3', 'off by 41']
    >>> off_by(Guess("A", "a", "", "")), off_by(Guess("b", "a", "", "")), off_by(None)
    ('right', 'wrong', '-')
    """
    if guess is None:
        return "-"
    said, was = guess.said, guess.was
    if isinstance(said, str) or isinstance(was, str):
        return "right" if str(said).lower() == str(was).lower() else "wrong"
    if said == was:
        return "right"
    if said <= 0 or was <= 0:
        return f"off by {abs(said - was):,.3g}"
    factor = max(said / was, was / said)
    return "near" if factor <= NEAR else f"x{factor:,.2g}"


def table(kept: Kept) -> list[Lesson]:
    """All lessons, in order."""
    found = {path.name[:2]: path for path in sorted((CHECKOUT / "notebooks").glob("??_*.ipynb"))}
    tasks = exercises()
    lessons = []
    for number in sorted({one[:2] for one in tasks}):
        path = found.get(number)
        title, asked = _notebook(path) if path else ("", [])
        questions = sorted({*asked, *(one for one in kept.predictions if one[:2] == number)})
        states = {one: _state(task.edition, one, kept) for one, task in tasks.items()}
        lessons.append(
            Lesson(
                number,
                title,
                path.name if path else "",
                {one: state for one, state in states.items() if one[:2] == number},
                {one: kept.predictions.get(one) for one in questions},
            )
        )
    return lessons


def _state(edition: str, exercise_id: str, kept: Kept) -> str:
    solved = kept.exercises.get(exercise_id)
    if solved is None:
        return OPEN
    return SOLVED if solved.edition == edition else EARLIER


def _notebook(path: Path) -> tuple[str, list[str]]:
    """Title and questions of a lesson; those of a notebook that was damaged are its file's name."""
    try:
        cells = ["".join(cell["source"]) for cell in read_json(path)["cells"]]
        title = re.match(r"# \d\d (.+)", cells[0])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return path.stem[3:].replace("_", " "), []
    asked = re.findall(r'^predict\("(\d\d\.\w)"', "\n".join(cells), re.M)
    return title[1].lower() if title else path.stem[3:].replace("_", " "), asked
