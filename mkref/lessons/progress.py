"""What has been solved and how far predictions were off, lesson by lesson: `progress()`.

The table of `mkref.lessons.progress_lessons` as text, as Markdown and for programs. It writes
nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkref.errors import RequestError
from mkref.lessons.progress_file import Kept, progress_path, read_kept
from mkref.lessons.progress_lessons import OPEN, Lesson, off_by, table

__all__ = ["Progress", "progress"]

HEAD = ("lesson", "exercises", "predictions")
LEGEND = {
    "*": "*: solved in an earlier edition; the exercise has changed since",
    "near": "near: within 10 %",
    "x": "x4.7: off by a factor of 4.7",
}


@dataclass(frozen=True)
class Progress:
    """A table that prints itself, and shows itself in a notebook.

    Attributes:
        lessons: in order.
        file: where it is kept, with ~ for the home folder; "" if nothing is kept.
        trouble: why the file cannot be read, which is then all that is shown; else "".
    """

    lessons: tuple[Lesson, ...]
    file: str
    trouble: str = ""

    @property
    def next(self) -> Lesson | None:
        """The first lesson with an open exercise."""
        return next((lesson for lesson in self.lessons if not lesson.done), None)

    def summary(self) -> str:
        """The sums, in a sentence."""
        states = [state for lesson in self.lessons for state in lesson.exercises.values()]
        made = [guess for lesson in self.lessons for guess in lesson.guesses.values()]
        given = [off_by(guess) for guess in made if guess is not None]
        good = sum(word in ("right", "near") for word in given)
        return (
            f"{len(states) - states.count(OPEN)} of {len(states)} exercises solved, "
            f"{len(given)} of {len(made)} predictions made, {good} of them right or near."
        )

    def legend(self) -> str:
        """What the signs mean that occur."""
        words = " ".join(" ".join(lesson.cells()[1:]) for lesson in self.lessons)
        signs = {"*": r"\d\*", "near": r"\bnear\b", "x": r"\bx\d"}
        return "; ".join(LEGEND[sign] for sign, seen in signs.items() if re.search(seen, words))

    def kept(self) -> str:
        """Where it is kept."""
        if not self.file:
            return "Nothing is kept: MKREF_PROGRESS is off."
        return f"Kept in {self.file} on this computer, and nowhere else."

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "file": self.file,
            "lessons": [
                {
                    "lesson": one.number,
                    "title": one.title,
                    "exercises": one.exercises,
                    "predictions": {
                        name: vars(guess) | {"off_by": off_by(guess)} if guess else None
                        for name, guess in one.guesses.items()
                    },
                }
                for one in self.lessons
            ],
            "next": self.next.number if self.next else None,
        }

    def __repr__(self) -> str:
        if self.trouble:
            return self.trouble
        rows = [HEAD, *(lesson.cells() for lesson in self.lessons)]
        wide = [max(len(row[i]) for row in rows) for i in (0, 1)]
        lines = [f"{a:{wide[0]}}  {b:{wide[1]}}  {c}".rstrip() for a, b, c in rows]
        todo = self.next
        then = f"Next: lesson {todo.number}, {todo.title}." if todo else "All exercises are solved."
        return "\n".join(
            [*lines, "", *filter(None, [self.legend()]), self.summary(), then, self.kept()]
        )

    def _repr_markdown_(self) -> str:
        if self.trouble:
            return self.trouble
        rows = [HEAD, ("---",) * 3, *(lesson.cells() for lesson in self.lessons)]
        lines = "\n".join(f"| {' | '.join(row)} |".replace("*", r"\*") for row in rows)
        todo = self.next
        then = "All exercises are solved."
        if todo:
            name = f"lesson {todo.number}, {todo.title}"
            then = f"Next: [{name}]({todo.file})." if todo.file else f"Next: {name}."
        notes = [self.legend().replace("*", r"\*"), self.summary(), then, self.kept()]
        return "\n\n".join([lines, *filter(None, notes)])


def progress() -> Progress:
    """What this learner has solved and guessed so far. It raises nothing: see `trouble`."""
    kept, file, trouble = Kept(), "", ""
    try:
        path = progress_path()
        file = _short(path) if path else ""
        kept = read_kept(path)
    except (OSError, RequestError) as error:
        trouble = f"progress: {error}"
    return Progress(tuple(table(kept)), file, trouble)


def _short(path: Path) -> str:
    """A path with ~ for the home folder, which is nobody's business on a projector."""
    try:
        return f"~/{path.relative_to(Path.home()).as_posix()}"
    except (ValueError, RuntimeError):
        return str(path)
