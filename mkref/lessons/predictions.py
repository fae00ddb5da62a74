"""Predictions: the learner commits to an answer before a run, and sees it beside the result after.

    predict("01.a", None, "tokens per second")        # replace None by a number
    ...
    compare("01.a", 469.8)

A commitment may be changed until it has been compared; after that it stands. Without one, the
lesson goes on and says so. What was compared is noted in the learner's own progress file
(`mkref.lessons.progress_file`); nothing leaves this computer, and nothing is graded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from mkref.lessons.progress_note import note_guess

__all__ = ["compare", "forget", "predict"]


CHOICES = "abcd"
"""Letters of the answers among which a question without a unit lets choose."""


@dataclass
class _Commitment:
    answer: float | str
    unit: str
    compared: bool = False


_COMMITTED: dict[str, _Commitment] = {}


def predict(question: str, answer: float | str | None, unit: str = "") -> None:
    """Commit to an answer.

    Args:
        question: id of the question, such as "01.a".
        answer: a number or the letter of a choice; None is no commitment.
        unit: unit of a number; with one, only a number is accepted, without one only a letter.
    """
    before = _COMMITTED.get(question)
    if before is not None and before.compared:
        print(f"You committed to {_text(before.answer, before.unit)} before; that stands.")
    elif answer is None:
        _COMMITTED.pop(question, None)
        print("No prediction yet: replace None by your answer and run this cell again.")
    elif (given := _read(answer, unit)) is None:
        kind = f"a number ({unit})" if unit else 'a letter in quotes, such as "b",'
        print(f"{answer!r} is no prediction here: give {kind} and run this cell again.")
    else:
        _COMMITTED[question] = _Commitment(given, unit)
        print(f"Committed: {_text(given, unit)}.")


def compare(question: str, actual: float | str) -> None:
    """Set the commitment beside what came out.

    Args:
        question: the id given to `predict`.
        actual: the number, or the letter of the right choice.
    """
    made = _COMMITTED.get(question)
    if made is None:
        print("You made no prediction here. Guess first next time: being wrong is what sticks.")
        return
    if not made.compared:
        made.compared = True
        note_guess(question, made.answer, actual, made.unit)
    said, is_ = _text(made.answer, made.unit), _text(actual, made.unit)
    if isinstance(actual, str) or isinstance(made.answer, str):
        right = str(made.answer).lower() == str(actual).lower()
        print(f"You said {said}: {'right.' if right else f'it is {is_}.'}")
        return
    print(f"You said {said}, it is {is_}: {_distance(made.answer, actual)}")


def forget() -> None:
    """Drop all commitments, as a fresh kernel has none."""
    _COMMITTED.clear()


def _read(answer: object, unit: str) -> float | str | None:
    """The commitment that an answer is; None if it is none.

    >>> _read("(b)", ""), _read(" 50 ", "percent"), _read("fifty", "percent"), _read(7, "")
    ('b', 50.0, None, None)
    """
    if not unit:
        plain = answer.strip(" ().") if isinstance(answer, str) else ""
        return plain if len(plain) == 1 and plain.lower() in CHOICES else None
    if isinstance(answer, str):
        try:
            answer = float(answer.strip(" ()"))
        except ValueError:
            return None
    if not isinstance(answer, Real) or not math.isfinite(answer):
        return None
    return answer if isinstance(answer, (int, float)) else float(answer)


def _text(value: float | str, unit: str) -> str:
    return f"({value})" if isinstance(value, str) else f"{value:,.6g} {unit}".strip()


def _distance(said: float, is_: float) -> str:
    """How far apart two numbers are, in words.

    >>> _distance(450, 469.8), _distance(100, 469.8), _distance(-1, 469.8), _distance(0.1, 0)
    ('within 10 %.', 'off by a factor of 4.7.', 'it cannot be 0 or less.', 'off by 0.1.')
    """
    if said == is_:
        return "right."
    if said <= 0 < is_:
        return "it cannot be 0 or less."
    if is_ <= 0:  # no ratio to speak of
        return f"off by {abs(said - is_):,.6g}."
    factor = max(said / is_, is_ / said)
    return "within 10 %." if factor <= 1.1 else f"off by a factor of {factor:,.2g}."
