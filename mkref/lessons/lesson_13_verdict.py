"""Exercise 13.3: a verdict about two rows of logits, ours and those of an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)

__all__ = ["EXERCISES", "verdict"]

Floats = npt.NDArray[Any]


def verdict(ours: Floats, theirs: Floats, spread: float, tie: float) -> str:
    """What two rows of logits for the same token say: "same", "near-tie" or "wrong".

    "wrong":    a logit is not finite; or the root mean square of the differences is above `spread`;
                or the best tokens differ, and it is no near-tie.
    "same":     both have the same best token.
    "near-tie": they have not, but in `ours` their best token is at most `tie` below our own.
    """
    # BEGIN SOLUTION
    import numpy as np

    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return "wrong"
    if not np.sqrt(np.mean((ours - theirs) ** 2)) <= spread:
        return "wrong"
    own, other = int(ours.argmax()), int(theirs.argmax())
    if own == other:
        return "same"
    return "near-tie" if ours[own] - ours[other] <= tie else "wrong"
    # END SOLUTION


WORDS = ("same", "near-tie", "wrong")
SPREAD, TIE = 0.2, 0.25
_ROWS = np.random.default_rng(13)
_LOGITS = (5 * _ROWS.standard_normal(64)).astype(np.float32)
_LOGITS[[7, 19, 30]] = 14.0, 13.9, 13.0
_QUARTERS = np.round(4 * _LOGITS) / 4  # differences without rounding: a limit is met exactly
_QUARTERS[19] = _QUARTERS[7] - TIE
_IN_TURN = np.where(np.arange(64) % 2, 0.3, -0.3).astype(np.float32)


def _row(**changes: float) -> Floats:
    """The row with some logits changed, such as l19=14.2."""
    row = _LOGITS.copy()
    for name, value in changes.items():
        row[int(name[1:])] = value
    return row


def _swapped() -> Floats:
    """The quarters with their two best, which are `TIE` apart, in each other's place."""
    row = _QUARTERS.copy()
    row[[7, 19]] = row[[19, 7]]
    return row


@dataclass(frozen=True)
class Case:
    """Two rows, the limit for their difference, and the right word."""

    where: str
    right: str
    ours: Floats
    theirs: Floats
    spread: float = SPREAD


# A NaN is the largest logit for `argmax`. Where it stands below, tokens and gap alone say "same" or
# "near-tie", so only a judge that asks for it finds it.
CASES = (
    Case("equal rows", "same", _LOGITS, _LOGITS),
    Case("noise in one logit", "same", _LOGITS, _row(l3=float(_LOGITS[3]) + 0.6)),
    Case("two best change places", "near-tie", _LOGITS, _row(l7=13.9, l19=14.0)),
    Case("a gap of exactly `tie`", "near-tie", _QUARTERS, _swapped()),
    Case("the best changes places with the third", "wrong", _LOGITS, _row(l30=14.1, l7=13.9)),
    Case("the gap is theirs, not ours", "wrong", _row(l7=14.6), _row(l7=13.95, l19=14.0)),
    Case("the gap is between the rows", "wrong", _row(l7=14.6), _row(l7=13.95, l19=14.5)),
    Case("near-tie, the other way round", "near-tie", _row(l7=13.99, l19=14.0), _row(l19=13.5)),
    Case("all logits 0.5 higher", "wrong", _LOGITS, _LOGITS + np.float32(0.5)),
    Case("all 0.5 higher, `spread` is 0.5", "same", _QUARTERS, _QUARTERS + np.float32(0.5), 0.5),
    Case("0.3 higher and 0.3 lower in turn", "wrong", _LOGITS, _LOGITS + _IN_TURN),
    Case("one logit of 64 is far off", "wrong", _LOGITS, _row(l3=float(_LOGITS[3]) - 3)),
    Case("a NaN in ours", "wrong", _row(l7=math.nan), _LOGITS),
    Case("a NaN in theirs", "wrong", _LOGITS, _row(l19=math.nan)),
    Case("all NaN", "wrong", _LOGITS * np.float32(np.nan), _LOGITS * np.float32(np.nan)),
    Case("an infinity in both", "wrong", _row(l7=math.inf), _row(l7=math.inf)),
    Case(
        "logits near 9, all off by 0.3", "wrong",
        1e-3 * _LOGITS + 9, 1e-3 * _LOGITS + np.float32(9.3),
    ),
    Case(
        "logits near 0, all off by 0.1", "same",
        1e-2 * _LOGITS, 1e-2 * _LOGITS + np.float32(0.1),
    ),
)  # fmt: skip


def _trial(case: Case) -> Property:
    def trial(answer: Answer) -> None:
        with np.errstate(all="ignore"):
            got = answer(case.ours.copy(), case.theirs.copy(), case.spread, TIE)
        if got is None:
            raise WrongAnswerError(f"it returns None, {EMPTY}")
        if not isinstance(got, str):
            raise WrongAnswerError(f"it returns a {type(got).__name__}, not one of the three words")
        if got not in WORDS:
            raise WrongAnswerError(f"it says {got!r:.40}, which is none of {', '.join(WORDS)}")
        if got != case.right:
            raise WrongAnswerError(f"it says {got!r}, must be {case.right!r}")

    return Property(case.where, trial)


def _rms(ours: Floats, theirs: Floats) -> float:
    return float(np.sqrt(np.mean((ours - theirs) ** 2)))


def _like(
    far: Callable[[Floats, Floats], float] | None = _rms,
    *,
    refused: Callable[[Floats, Floats], Any] | None = None,
    gap: str = "ours",
    limits: str = "",
    word: str = "near-tie",
) -> Answer:
    """A verdict with one of its parts left out or changed.

    Args:
        far: what must be at most `spread`; None is nothing. A NaN lets pass: `far > spread`.
        refused: what is "wrong" before all else; None is a row that is not finite.
        gap: between which two logits.
        limits: "spread" or "tie": that value itself is refused, too.
        word: for a near-tie.
    """

    def answer(ours: Floats, theirs: Floats, spread: float, tie: float) -> str:
        finite = np.isfinite(ours).all() and np.isfinite(theirs).all()
        if not finite if refused is None else refused(ours, theirs):
            return "wrong"
        distance = 0.0 if far is None else far(ours, theirs)
        if distance > spread or (limits == "spread" and distance == spread):
            return "wrong"
        own, other = int(ours.argmax()), int(theirs.argmax())
        if own == other:
            return "same"
        two = np.sort(ours)[-2:]
        between = {
            "ours": ours[own] - ours[other],
            "theirs": theirs[other] - theirs[own],
            "logits": abs(ours[own] - theirs[other]),
            "none": 0.0,
            "two best": two[1] - two[0],
        }[gap]
        return word if between < tie or (limits != "tie" and between == tie) else "wrong"

    return answer


MISTAKES = (
    Mistake(
        _like(refused=lambda a, b: False),
        "a NaN has passed: every comparison with NaN is false, so `x > limit` does not refuse it. "
        "Ask whether all logits are finite, before anything else.",
    ),
    Mistake(
        _like(refused=lambda a, b: not np.isfinite(a).all()),
        "only our logits are asked whether they are finite. A NaN in theirs makes the root mean "
        "square NaN, and `x > limit` does not refuse that.",
    ),
    Mistake(
        _like(refused=lambda a, b: not np.isfinite(b).all()),
        "only their logits are asked whether they are finite. A NaN is at least as likely in ours.",
    ),
    Mistake(
        _like(refused=lambda a, b: np.isnan(a).any() or np.isnan(b).any()),
        "`isnan` does not find an infinity, and infinity minus infinity is NaN, which passes every "
        "`x > limit`. `np.isfinite` refuses both.",
    ),
    Mistake(
        lambda a, b, spread, tie: (
            "same"
            if np.allclose(a, b, atol=spread, rtol=0, equal_nan=True)
            else _like()(a, b, spread, tie)
        ),
        "`equal_nan` lets two rows of NaN agree. A model that computes NaN twice is wrong twice.",
    ),
    Mistake(
        _like(None),
        "only the best tokens are compared. Logits that are all off are wrong, even if the best "
        "token is right by luck.",
    ),
    Mistake(
        _like(lambda a, b: 0.0 if np.allclose(a, b, rtol=0.05) else math.inf),
        "that is a difference relative to each logit. Logits near 0 would have to be exact, large "
        "ones may be off by more than the gap between two tokens.",
    ),
    Mistake(
        _like(lambda a, b: _rms(a, b) / float(np.sqrt(np.mean(a**2)))),
        "the root mean square is divided by that of a row: it is relative. What decides is the "
        "distance between tokens, and that is absolute.",
    ),
    Mistake(
        _like(lambda a, b: float(np.sqrt(np.mean(((a - b) / a) ** 2)))),
        "each difference is divided by its logit before the root mean square. A logit near 0 then "
        "counts more than all others; take the differences as they are.",
    ),
    Mistake(
        _like(lambda a, b: float(np.abs(a - b).max())),
        "that is the largest difference. One expert chosen otherwise moves single logits far; the "
        "question here is the root mean square over all.",
    ),
    Mistake(
        _like(lambda a, b: float(np.linalg.norm(a - b))),
        "that is the root of the sum of the squares, which grows with the number of logits. Take "
        "the root of their mean.",
    ),
    Mistake(
        _like(lambda a, b: float(np.mean((a - b) ** 2))),
        "that is the mean square. Without the root 0.3 counts as 0.09: it is no longer a distance "
        "in logits.",
    ),
    Mistake(
        _like(lambda a, b: float(np.abs(a - b).mean())),
        "that is the mean of the absolute differences. One logit that is far off is lost in it; "
        "the root mean square weighs large differences more.",
    ),
    Mistake(
        _like(lambda a, b: float(abs(np.mean(a - b)))),
        "that is the mean of the differences with their signs: above and below cancel. Square them "
        "first.",
    ),
    Mistake(
        _like(lambda a, b: float(np.std(a - b))),
        "`std` takes the mean difference away first, so rows that are all off by the same pass. "
        "The root mean square does not.",
    ),
    Mistake(
        _like(gap="none"),
        "whatever the gap, another best token counts as a near-tie. How far is their token below "
        "ours?",
    ),
    Mistake(
        _like(gap="theirs"),
        "the gap is taken from their logits. We have chosen by ours: how sure were we?",
    ),
    Mistake(
        _like(gap="logits"),
        "that is the difference of two logits of different tokens in different rows. The gap is "
        "between two tokens of one row.",
    ),
    Mistake(
        _like(gap="two best"),
        "the gap between our two best tokens is small, but theirs is another one, further down.",
    ),
    Mistake(
        _like(limits="tie"),
        "a gap of exactly `tie` is refused. At most `tie` includes `tie` itself: `<=`.",
    ),
    Mistake(
        _like(limits="spread"),
        "a root mean square of exactly `spread` is refused. Only what is above `spread` is wrong.",
    ),
    Mistake(
        _like(word="near tie"),
        'the word is "near-tie", with a hyphen. All three are compared letter by letter.',
    ),
)

EXERCISES = (
    PythonExercise(
        id="13.3",
        solution=verdict,
        properties=tuple(_trial(case) for case in CASES),
        mistakes=MISTAKES,
        then="Now read `run_oracle` and `tie` of bench/agreement.py: what passes there, not here?",
    ),
)
