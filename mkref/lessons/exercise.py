"""What an exercise is: its solution, the starter made from it, and how an answer is judged.

The solution is a Python function in one of the `lesson_NN` modules. The lines between its marks
`# BEGIN SOLUTION` and `# END SOLUTION` are blanked out to make the starter, so the two cannot drift
apart. An answer is judged by named properties on inputs that a lucky or trivial answer does not
satisfy; known mistakes are recognised by their results and get their own hint.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "Exercise", "Mistake", "Property", "WrongAnswerError", "expect"]

Answer = Callable[..., Any]
BLANK = "# Your code here."
_MARKED = re.compile(r"^( *)# BEGIN SOLUTION\n(.*?)^ *# END SOLUTION\n", re.DOTALL | re.MULTILINE)


class WrongAnswerError(Exception):
    """An answer does not have a property; the message says what was seen."""


@dataclass(frozen=True)
class Property:
    """One thing that a right answer does; `trial` raises `WrongAnswerError` if it does not."""

    name: str
    trial: Callable[[Answer], None]


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer as a function, and what to say to somebody who made it."""

    answer: Answer
    says: str


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        id: lesson and number, such as "01.1".
        solution: the function that solves it, with marks around the part to be written.
        properties: what is tried, in order.
        mistakes: answers that are recognised.
        samples: argument tuples on which mistakes are told apart.
        then: what to think about once it is solved.
    """

    id: str
    solution: Answer
    properties: tuple[Property, ...]
    mistakes: tuple[Mistake, ...]
    samples: tuple[tuple[Any, ...], ...]
    then: str

    @property
    def name(self) -> str:
        """Name of the function that the learner writes."""
        return self.solution.__name__

    @property
    def source(self) -> str:
        """The solution with its marks."""
        return textwrap.dedent(inspect.getsource(self.solution))

    @property
    def starter(self) -> str:
        """What the notebook shows: the solution without its marked part."""
        return self._plain(_MARKED.sub(lambda m: textwrap.indent(BLANK, m[1]) + "\n", self.source))

    @property
    def solution_text(self) -> str:
        """What the folded solution shows: the solution without the marks."""
        return self._plain(_MARKED.sub(lambda m: m[2], self.source))

    def _plain(self, source: str) -> str:
        """Without annotations, whose names a notebook would have to import first."""
        parameters = ", ".join(inspect.signature(self.solution).parameters)
        return re.sub(
            r"^def .*:$", f"def {self.name}({parameters}):", source, count=1, flags=re.M
        ).rstrip()


def expect(expected: float, actual: Any, where: str, *, tolerance: float = 0.0) -> None:
    """Compare a number that an answer gave.

    Args:
        expected: what is right.
        actual: what the answer returned; anything that is no number is refused, and so is NaN.
        where: the inputs, in words.
        tolerance: relative difference that is allowed.

    Raises:
        WrongAnswerError: they differ.
    """
    if actual is None:
        raise WrongAnswerError(
            "it returns None, so nothing has been written or `return` is missing"
        )
    try:
        number = float(actual)
    except (TypeError, ValueError):
        raise WrongAnswerError(f"{where}: it returns {actual!r}, which is not a number") from None
    if not abs(number - expected) <= tolerance * abs(expected):
        raise WrongAnswerError(f"{where}: {expected:,.10g} is right, it returns {number:,.10g}")
