"""Note what was solved and guessed in the learner's own file (`mkref.lessons.progress_file`).

`check` notes an exercise that was solved, `compare` a prediction. It never disturbs a lesson: if
nothing can be noted, one line says so, once.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import TYPE_CHECKING

from mkref.errors import RequestError
from mkref.lessons.progress_file import (
    Guess,
    Kept,
    Solved,
    locked,
    progress_path,
    read_kept,
    write_kept,
)

if TYPE_CHECKING:
    from mkref.lessons.exercise import Exercise

__all__ = ["note_exercise", "note_guess"]

_warned: list[str] = []


def note_exercise(task: Exercise) -> None:
    """Note that an exercise has been solved; the first day of an edition stands."""

    def change(kept: Kept) -> bool:
        before, edition = kept.exercises.get(task.id), task.edition
        if before is not None and before.edition == edition:
            return False
        kept.exercises[task.id] = Solved(edition, date.today().isoformat())
        return True

    _note(change)


def note_guess(question: str, said: float | str, was: float | str, unit: str) -> None:
    """Note a prediction that was compared; the first one stands, as it does in the lesson."""

    def change(kept: Kept) -> bool:
        if question in kept.predictions:
            return False
        plain = [one if isinstance(one, str) else float(one) for one in (said, was)]
        kept.predictions[question] = Guess(plain[0], plain[1], unit, date.today().isoformat())
        return True

    _note(change)


def _note(change: Callable[[Kept], bool]) -> None:
    """Change the file; whatever stands in the way is told once, in one line."""
    try:
        path = progress_path()
        if path is None or not change(read_kept(path)):
            return
        with locked(path):
            kept = read_kept(path)  # another notebook may have written meanwhile
            if change(kept):
                write_kept(path, kept)
    except (OSError, ValueError, TypeError, RequestError) as error:
        if not _warned:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            name = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
            _warned.append(" ".join(f"{name}{why}".split()))
            print(f"Progress is not kept ({_warned[0]}). The lesson does not need it.")
