"""Lesson 13: its exercises in Python, a sum whose bits are fixed and a verdict about two oracles.

The third exercise, in CUDA, is in `lesson_13_merge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

__all__ = ["CHUNK", "EXERCISES", "bits_of", "fixed_sum", "in_order", "numbers", "per_sm", "verdict"]

CHUNK = 128
"""Values of a chunk: a part of the definition of the sum."""
Floats = npt.NDArray[Any]


def fixed_sum(x: Floats, n_sm: int) -> np.float32:
    """The sum of x, float32, on `n_sm` SMs, with bits that do not depend on `n_sm`.

    Chunk c is x[128 c : 128 c + 128], the last one is filled up with zeros. It belongs to SM
    c % n_sm. Within a chunk: first half plus second half, value by value, until one value is left.
    The sums of the chunks are then added one after another, chunk 0 first.
    """
    # BEGIN SOLUTION
    import numpy as np

    n_chunks = -(-len(x) // 128)
    padded = np.zeros(128 * n_chunks, np.float32)
    padded[: len(x)] = x
    of_chunk = [np.float32(0)] * n_chunks
    for sm in range(n_sm):
        for c in range(sm, n_chunks, n_sm):
            v = padded[128 * c : 128 * c + 128]
            while len(v) > 1:
                half = len(v) // 2
                v = v[:half] + v[half:]
            of_chunk[c] = v[0]  # kept under the chunk's number, not added to the SM's others
    total = of_chunk[0]
    for one in of_chunk[1:]:
        total = total + one
    return total
    # END SOLUTION


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


def numbers(n: int, seed: int = 13) -> Floats:
    """Numbers as they meet in a product: both signs, sizes over some powers of two."""
    rng = np.random.default_rng([seed, n])
    scale = np.exp2(rng.integers(-6, 7, n))
    return np.asarray((rng.standard_normal(n) * scale).astype(np.float32))


def bits_of(value: Any) -> str:
    """The 32 bits of a float32, in hexadecimal.

    >>> bits_of(1.0)
    '3f800000'
    """
    return f"{int(np.float32(value).view(np.uint32)):08x}"


def in_order(x: Floats) -> np.float32:
    """One value after another, float32."""
    return np.float32(np.add.accumulate(np.asarray(x, np.float32))[-1])


def per_sm(x: Floats, n_sm: int) -> np.float32:
    """The tempting way: every SM adds its values, x[sm], x[sm + n_sm], ..., then SM after SM."""
    return in_order(np.array([in_order(x[sm::n_sm]) for sm in range(n_sm)], np.float32))


def _chunks(x: Floats) -> list[Floats]:
    padded = np.zeros(-(-len(x) // CHUNK) * CHUNK, np.float32)
    padded[: len(x)] = x
    return list(padded.reshape(-1, CHUNK))


def _halves(v: Floats) -> np.float32:
    while len(v) > 1:
        v = v[: len(v) // 2] + v[len(v) // 2 :]
    return np.float32(v[0])


def _neighbours(v: Floats) -> np.float32:
    while len(v) > 1:
        v = v[0::2] + v[1::2]
    return np.float32(v[0])


def _in_sms(x: Floats, n_sm: int) -> np.float32:
    """The SM's chunks are added in the SM."""
    sums = np.array([_halves(chunk) for chunk in _chunks(x)], np.float32)
    return in_order(np.array([in_order(sums[sm::n_sm]) for sm in range(min(n_sm, len(sums)))]))


def _as_they_come(x: Floats, n_sm: int) -> np.float32:
    """SM after SM, each chunk by chunk."""
    sums = [_halves(chunk) for chunk in _chunks(x)]
    return in_order(np.array([s for sm in range(n_sm) for s in sums[sm::n_sm]], np.float32))


def _cut_by_sms(x: Floats, n_sm: int) -> np.float32:
    parts = [part for part in np.array_split(np.asarray(x, np.float32), n_sm) if len(part)]
    return in_order(np.array([in_order(part) for part in parts], np.float32))


SEEDS = range(6)
"""Some wrong orders give the right bits for some numbers: each case is tried with several."""
SIZES: tuple[tuple[str, int, int], ...] = (
    ("one chunk on one SM", CHUNK, 1),
    ("20 chunks on one SM", 20 * CHUNK, 1),
    ("20 chunks on 2 SMs", 20 * CHUNK, 2),
    ("20 chunks on 7 SMs", 20 * CHUNK, 7),
    ("20 chunks on 132 SMs", 20 * CHUNK, 132),
    ("1,000 values on 3 SMs", 1000, 3),
)
LARGE = np.array([2.0**24, *255 * [1.0]], np.float32)


def _sum_trial(where: str, arrays: Sequence[Floats], n_sm: int) -> Property:
    def trial(answer: Answer) -> None:
        for x in arrays:
            right = fixed_sum(x, n_sm)
            with np.errstate(all="ignore"):
                got = answer(x.copy(), n_sm)
            if got is None:
                raise WrongAnswerError(f"it returns None, {EMPTY}")
            if np.ndim(got) or isinstance(got, str):
                raise WrongAnswerError(f"it returns a {type(got).__name__}, not a number")
            if not np.float64(got) == np.float64(right):
                raise WrongAnswerError(
                    f"{float(right):.9g} is right, bits {bits_of(right)}; it returns "
                    f"{float(got):.9g}, bits {bits_of(got)}"
                )

    return Property(where, trial)


def _nan_stays(answer: Answer) -> None:
    x = numbers(300)
    x[200] = np.nan
    with np.errstate(all="ignore"):
        got = answer(x, 2)
    if got is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if np.ndim(got) or isinstance(got, str) or not math.isnan(float(got)):
        raise WrongAnswerError("a NaN among the values has vanished")


_SUM_MISTAKES = (
    Mistake(
        _in_sms,
        "each SM adds its own chunks first, so which chunks meet first depends on n_sm. Keep the "
        "sums apart, under the number of the chunk, until all are there.",
    ),
    Mistake(
        _as_they_come,
        "the chunks' sums are added SM after SM, so their order depends on n_sm. Which order "
        "does not?",
    ),
    Mistake(
        _cut_by_sms,
        "the values are cut into as many parts as there are SMs. Where a chunk begins must follow "
        "from its number alone.",
    ),
    Mistake(
        lambda x, n_sm: in_order(x),
        "this does not depend on n_sm, but it is another sum: value after value, which one thread "
        "would have to do alone. Within a chunk halves are added.",
    ),
    Mistake(
        lambda x, n_sm: in_order(np.array([_neighbours(c) for c in _chunks(x)], np.float32)),
        "fixed, and as good, but other bits: neighbours are added here, the definition says first "
        "half plus second half.",
    ),
    Mistake(
        lambda x, n_sm: in_order(np.array([c.sum(dtype=np.float32) for c in _chunks(x)])),
        "the chunks are right, and `sum` of NumPy adds each in an order of its own, which is not "
        "the defined one. Write out first half plus second half.",
    ),
    Mistake(
        lambda x, n_sm: _halves(np.add.accumulate(np.array(_chunks(x)))[-1]),
        "all chunks are added into one, value by value, and halved at the end. Each chunk has a "
        "sum of its own, down to one value; only then are the sums added.",
    ),
    Mistake(
        lambda x, n_sm: np.float32(np.asarray(x, np.float64).sum()),
        "added in float64 and rounded once. It is nearer to the true sum, and not what was "
        "defined: with the same bits as the goal, better is wrong, too.",
    ),
    Mistake(
        lambda x, n_sm: in_order(np.array(sorted(_halves(c) for c in _chunks(x)), np.float32)),
        "the chunks' sums are sorted by size. Their order must be that of their numbers.",
    ),
)

_ROWS = np.random.default_rng(13)
_LOGITS = (5 * _ROWS.standard_normal(40)).astype(np.float32)
_LOGITS[[7, 19, 30]] = 14.0, 13.9, 13.0


def _row(**changes: float) -> Floats:
    """The row with some logits changed, such as l19=14.2."""
    row = _LOGITS.copy()
    for name, value in changes.items():
        row[int(name[1:])] = value
    return row


_FAR = _LOGITS + np.float32(0.5)
VERDICTS: tuple[tuple[str, str, Floats, Floats], ...] = (
    ("equal rows", "same", _LOGITS, _LOGITS),
    ("noise in one logit", "same", _LOGITS, _row(l3=float(_LOGITS[3]) + 0.6)),
    ("two best change places", "near-tie", _LOGITS, _row(l7=13.9, l19=14.0)),
    ("the best change places with the third", "wrong", _LOGITS, _row(l30=14.1, l7=13.9)),
    ("the gap is theirs, not ours", "wrong", _row(l7=14.6), _row(l7=13.95, l19=14.0)),
    ("the gap is between the rows", "wrong", _row(l7=14.6), _row(l7=13.95, l19=14.5)),
    ("near-tie, the other way round", "near-tie", _row(l7=13.99, l19=14.0), _row(l19=13.5)),
    ("all logits 0.5 higher", "wrong", _LOGITS, _FAR),
    ("one logit of 40 is far off", "wrong", _LOGITS, _row(l3=float(_LOGITS[3]) - 3)),
    ("a NaN in ours", "wrong", _row(l3=math.nan), _LOGITS),
    ("a NaN in theirs", "wrong", _LOGITS, _row(l3=math.nan)),
    ("all NaN", "wrong", _LOGITS * np.float32(np.nan), _LOGITS * np.float32(np.nan)),
    ("an infinity in both", "wrong", _row(l7=math.inf), _row(l7=math.inf)),
    (
        "logits near 9, all off by 0.3",
        "wrong",
        1e-3 * _LOGITS + 9,
        1e-3 * _LOGITS + np.float32(9.3),
    ),
)
SPREAD, TIE = 0.2, 0.25


def _verdict_trial(where: str, right: str, ours: Floats, theirs: Floats) -> Property:
    def trial(answer: Answer) -> None:
        with np.errstate(all="ignore"):
            got = answer(ours.copy(), theirs.copy(), SPREAD, TIE)
        if got is None:
            raise WrongAnswerError(f"it returns None, {EMPTY}")
        if not isinstance(got, str):
            raise WrongAnswerError(f"it returns a {type(got).__name__}, not one of the three words")
        if got != right:
            raise WrongAnswerError(f"it says {got!r}, must be {right!r}")

    return Property(where, trial)


def _like(
    *, finite: bool = True, near: Callable[[Floats, Floats], bool] | None = None, gap: str = "ours"
) -> Answer:
    """A verdict with one of its parts left out or changed."""

    def answer(ours: Floats, theirs: Floats, spread: float, tie: float) -> str:
        if finite and not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
            return "wrong"
        if near is not None and not near(ours, theirs):
            return "wrong"
        own, other = int(ours.argmax()), int(theirs.argmax())
        if own == other:
            return "same"
        two = np.sort(ours)[-2:]
        gaps = {
            "ours": ours[own] - ours[other],
            "theirs": theirs[other] - theirs[own],
            "logits": abs(ours[own] - theirs[other]),
            "none": 0.0,
            "two best": two[1] - two[0],
        }
        return "near-tie" if gaps[gap] <= tie else "wrong"

    return answer


def _rms(ours: Floats, theirs: Floats) -> bool:
    return bool(np.sqrt(np.mean((ours - theirs) ** 2)) <= SPREAD)


_VERDICT_MISTAKES = (
    Mistake(
        _like(finite=False, near=lambda a, b: not np.sqrt(np.mean((a - b) ** 2)) > SPREAD),
        "a NaN has passed: every comparison with NaN is false, so `x > limit` does not refuse it. "
        "Ask whether all logits are finite, before anything else.",
    ),
    Mistake(
        lambda a, b, spread, tie: (
            "same"
            if np.allclose(a, b, atol=spread, rtol=0, equal_nan=True)
            else _like(near=_rms)(a, b, spread, tie)
        ),
        "`equal_nan` lets two rows of NaN agree. A model that computes NaN twice is wrong twice.",
    ),
    Mistake(
        _like(),
        "only the best tokens are compared. Logits that are all off are wrong, even if the best "
        "token is right by luck.",
    ),
    Mistake(
        _like(near=lambda a, b: bool(np.allclose(a, b, rtol=0.05))),
        "that is a difference relative to each logit. Logits near 0 would have to be exact, large "
        "ones may be off by more than the gap between two tokens.",
    ),
    Mistake(
        _like(near=lambda a, b: bool(np.abs(a - b).max() <= SPREAD)),
        "that is the largest difference. One expert chosen otherwise moves single logits far; the "
        "question here is the root mean square over all.",
    ),
    Mistake(
        _like(near=_rms, gap="none"),
        "whatever the gap, another best token counts as a near-tie. How far is their token below "
        "ours?",
    ),
    Mistake(
        _like(near=_rms, gap="theirs"),
        "the gap is taken from their logits. We have chosen by ours: how sure were we?",
    ),
    Mistake(
        _like(near=_rms, gap="logits"),
        "that is the difference of two logits of different tokens in different rows. The gap is "
        "between two tokens of one row.",
    ),
    Mistake(
        _like(near=_rms, gap="two best"),
        "the gap between our two best tokens is small, but theirs is another one, further down.",
    ),
)

EXERCISES = (
    PythonExercise(
        id="13.1",
        solution=fixed_sum,
        properties=(
            *(
                _sum_trial(where, [numbers(n, seed) for seed in SEEDS], n_sm)
                for where, n, n_sm in SIZES
            ),
            _sum_trial("2^24 and 255 ones on 2 SMs", [LARGE], 2),
            Property("a NaN stays a NaN", _nan_stays),
        ),
        mistakes=_SUM_MISTAKES,
        samples=tuple((numbers(n, seed), n_sm) for _, n, n_sm in SIZES for seed in SEEDS),
        then="Now: which of the three levels of this sum does a product of the kernel have?",
    ),
    PythonExercise(
        id="13.3",
        solution=verdict,
        properties=tuple(_verdict_trial(*case) for case in VERDICTS),
        mistakes=_VERDICT_MISTAKES,
        then="Now read `run_oracle` and `tie` of bench/agreement.py: what passes there, not here?",
    ),
)
