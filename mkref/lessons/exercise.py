"""What an exercise is: its solution, the starter made from it, and how an answer is judged.

Two kinds share one form (`Exercise`). A `PythonExercise` asks for a function, of numbers or of a
plan; its solution is a function in a `lesson_NN` module. A `CudaExercise` (mkref.lessons.cuda) asks
for CUDA source text; its solution lies in a `.cu` file. In both, the lines between the marks BEGIN
SOLUTION and END SOLUTION are blanked out to make the starter, so the two cannot drift apart. An
answer is judged by named properties on inputs that a lucky or trivial answer does not satisfy;
known mistakes are recognised by what they do and get their own hint.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mkref.errors import RequestError
from mkref.lessons.deadline import EndlessError, deadline

__all__ = [
    "BLANK",
    "EMPTY",
    "ENDLESS",
    "LATER",
    "Answer",
    "Exercise",
    "Mistake",
    "Property",
    "PythonExercise",
]
__all__ += ["Results", "WrongAnswerError", "blanked", "expect", "finding", "unmarked"]

Answer = Callable[..., Any]
Results = tuple[tuple[str, str], ...]
"""For every property its name, and what went wrong or ""."""

BLANK = "Your code here."
LATER = "not tried after that"
TRIAL_S = 30.0
"""Most seconds of one trial of a Python answer; right ones take a moment, with a plan some."""
ENDLESS = f"it has not ended after {TRIAL_S:.0f} seconds: a loop whose condition stays true?"
EMPTY = "so nothing has been written or `return` is missing"
_MARKED = re.compile(
    r"^( *)(#|//) BEGIN SOLUTION\n(.*?)^ *(?:#|//) END SOLUTION\n", re.DOTALL | re.MULTILINE
)


class WrongAnswerError(Exception):
    """An answer does not have a property; the message says what was seen."""


@dataclass(frozen=True)
class Property:
    """One thing that a right answer does.

    Attributes:
        name: what holds, such as "an empty cache costs nothing".
        trial: raises `WrongAnswerError` if it does not. Gets the learner's function, or for CUDA a
            `mkref.lessons.program.Program`.
    """

    name: str
    trial: Callable[[Any], None]


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer as a function, and what to say to somebody who made it."""

    answer: Answer
    says: str


class Exercise(ABC):
    """What all exercises have.

    Attributes:
        id: lesson and number, such as "01.1".
        properties: what is tried, in order.
        then: what to think about once it is solved.
    """

    id: str
    properties: tuple[Property, ...]
    then: str

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of what the learner's cell defines."""

    @property
    @abstractmethod
    def starter(self) -> str:
        """Source of the cell that the notebook shows."""

    @property
    @abstractmethod
    def solution_cell(self) -> str:
        """Source of that cell with the solution in it."""

    @property
    @abstractmethod
    def solution_text(self) -> str:
        """What the folded solution shows."""

    @property
    @abstractmethod
    def language(self) -> str:
        """Of `solution_text`, as Markdown names it."""

    @property
    def edition(self) -> str:
        """A short text that is another one when something else is asked: starter, properties."""
        asked = (self.name, self.starter, *(one.name for one in self.properties))
        return hashlib.sha256("\0".join(asked).encode()).hexdigest()[:12]

    @property
    @abstractmethod
    def n_mistakes(self) -> int:
        """Number of known mistakes."""

    @abstractmethod
    def mistake(self, number: int) -> tuple[Any, str]:
        """A known mistake as an answer, and its hint."""

    @abstractmethod
    def judge(self, answer: Any) -> tuple[Results, str]:
        """Try all properties; results, and the hint of a recognised mistake or "".

        Raises:
            RequestError: `answer` is not what the exercise asks for.
        """


@dataclass(frozen=True)
class PythonExercise(Exercise):
    """A function to be written in Python.

    Attributes:
        id, properties, then: as of every exercise.
        solution: the function that solves it, with marks around the part to be written.
        mistakes: answers that are recognised.
        samples: argument tuples on which mistakes are told apart by the number that they give; if
            there are none, they are told apart by the messages of the properties.
    """

    id: str
    solution: Answer
    properties: tuple[Property, ...]
    mistakes: tuple[Mistake, ...] = ()
    samples: tuple[tuple[Any, ...], ...] = ()
    then: str = ""

    @property
    def name(self) -> str:
        """Name of the function that the learner writes."""
        return self.solution.__name__

    @property
    def language(self) -> str:
        """Python."""
        return "python"

    @property
    def source(self) -> str:
        """The solution with its marks."""
        return textwrap.dedent(inspect.getsource(self.solution))

    @property
    def starter(self) -> str:
        """The solution without its marked part."""
        return self._plain(blanked(self.source))

    @property
    def solution_text(self) -> str:
        """The solution without the marks."""
        return self._plain(unmarked(self.source))

    @property
    def solution_cell(self) -> str:
        """The same: a function is a cell."""
        return self.solution_text

    @property
    def n_mistakes(self) -> int:
        """Number of known mistakes."""
        return len(self.mistakes)

    def mistake(self, number: int) -> tuple[Answer, str]:
        """Function and hint."""
        return self.mistakes[number].answer, self.mistakes[number].says

    def judge(self, answer: Answer) -> tuple[Results, str]:
        """Call the function with the properties' inputs."""
        if not callable(answer):
            raise RequestError(f"check: give the function {self.name} itself, not {answer!r}")
        results = self._try(answer)
        failed = any(wrong for _, wrong in results)
        return results, self._recognise(answer, results) if failed else ""

    def _try(self, answer: Answer) -> Results:
        results: list[tuple[str, str]] = []
        for one in self.properties:
            ended = not any(wrong == ENDLESS for _, wrong in results)
            results.append((one.name, finding(one.trial, answer, TRIAL_S) if ended else LATER))
        return tuple(results)

    def _recognise(self, answer: Answer, results: Results) -> str:
        if any(wrong == ENDLESS for _, wrong in results):
            return ""
        given = _numbers(answer, self.samples)
        for mistake in self.mistakes:
            if self.samples:
                same = None not in given and given == _numbers(mistake.answer, self.samples)
            else:
                tried = zip(self.properties, results, strict=True)  # ends with the first difference
                same = all(finding(p.trial, mistake.answer) == wrong for p, (_, wrong) in tried)
            if same:
                return mistake.says
        return ""

    def _plain(self, source: str) -> str:
        """Without annotations, whose names a notebook would have to import first."""
        parameters = ", ".join(inspect.signature(self.solution).parameters)
        return re.sub(
            r"^def .*?:$", f"def {self.name}({parameters}):", source, count=1, flags=re.M | re.S
        ).rstrip()


def blanked(source: str) -> str:
    """A source without what stands between the marks.

    >>> blanked("a\\n  // BEGIN SOLUTION\\n  b;\\n  // END SOLUTION\\nc\\n")
    'a\\n  // Your code here.\\nc\\n'
    """
    return _MARKED.sub(lambda m: f"{m[1]}{m[2]} {BLANK}\n", source)


def unmarked(source: str) -> str:
    """A source with what stands between the marks, and without them."""
    return _MARKED.sub(lambda m: m[3], source)


def finding(trial: Callable[[Any], None], answer: Any, seconds: float | None = None) -> str:
    """What went wrong, or "". An error inside the answer is a finding, not a crash, and so is a
    loop that has not ended after so many seconds, if a limit is given.
    """
    try:
        with deadline(seconds):
            trial(answer)
    except EndlessError:
        return ENDLESS
    except WrongAnswerError as wrong:
        return str(wrong)
    except Exception as error:
        return f"it stops with {type(error).__name__}: {error}"
    return ""


def _numbers(answer: Answer, samples: Sequence[tuple[Any, ...]]) -> list[float | None]:
    """Nine digits of what it returns for every sample; None where that is no number."""
    results: list[float | None] = []
    for sample in samples:
        try:
            results.append(float(f"{float(answer(*sample)):.9g}"))
        except Exception:
            results.append(None)
    return results


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
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    try:
        number = float(actual)
    except (TypeError, ValueError):
        raise WrongAnswerError(f"{where}: it returns {actual!r}, which is not a number") from None
    if not abs(number - expected) <= tolerance * abs(expected):
        raise WrongAnswerError(f"{where}: {expected:,.10g} is right, it returns {number:,.10g}")
