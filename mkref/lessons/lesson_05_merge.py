"""Lesson 05, the second exercise: the merge of splits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
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

__all__ = ["EXERCISES", "merge"]

Numbers = npt.NDArray[Any]


def merge(m: Numbers, s: Numbers, o: Numbers) -> Numbers:
    """The attention output of a head from the results of its n splits.

    The scores x of the keys are in base 2, so weights are 2^x. Split i has left
        m[i] = max x      s[i] = sum of 2^(x - m[i])      o[i] = sum of 2^(x - m[i]) v
    `m` and `s` (the kernel's l) are arrays [n], `o` is [n, D]; the result is an array [D], all
    of them float64.
    """
    # BEGIN SOLUTION
    weight = 2.0 ** (m - m.max())
    total = (s * weight).sum()
    return (o * weight[:, None]).sum(axis=0) / total
    # END SOLUTION


def _parts(
    lengths: tuple[int, ...], shift: tuple[float, ...], seed: int, dims: int = 5
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """m, l, o of splits with these numbers of keys, and the output over all keys at once; scores
    of split i are near shift[i]."""
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    scores = rng.normal(0, 3, n) + np.repeat(np.arange(len(lengths)) * 1.5 + shift, lengths)
    values = rng.normal(0, 1, (n, dims))
    ends = np.cumsum((0, *lengths))
    m = np.array([scores[a:b].max() for a, b in pairwise(ends)])
    p = 2.0 ** (scores - np.repeat(m, lengths))
    pieces = [slice(a, b) for a, b in pairwise(ends)]
    sums = np.array([p[piece].sum() for piece in pieces])
    o = np.array([p[piece] @ values[piece] for piece in pieces])
    whole = 2.0 ** (scores - scores.max())
    return m, sums, o, whole @ values / whole.sum()


def _merged(where: str, lengths: tuple[int, ...], *shift: float) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        *given, right = _parts(lengths, shift or (0.0,) * len(lengths), seed=len(lengths))
        with np.errstate(all="ignore"):
            got = answer(*(part.copy() for part in given))
        if got is None:
            raise WrongAnswerError(f"it returns None, {EMPTY}")
        shape = np.shape(got)
        if shape != right.shape:
            raise WrongAnswerError(f"{where}: it returns shape {shape}, must be {right.shape}")
        values = np.asarray(got, dtype=np.float64)
        if np.asarray(got).dtype == np.float32:
            raise WrongAnswerError(f"{where}: it returns float32, must be float64")
        wrong = np.flatnonzero(~(np.abs(values - right) <= 1e-9))
        if wrong.size:
            at = int(wrong[0])
            has, must = _apart(values[at], right[at])
            raise WrongAnswerError(f"{where}: dimension {at} is {has}, must be {must}")

    return trial


def _apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers with so many digits that they look different."""
    texts = [(f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in (4, 8, 12, 17)]
    return next((a, b) for a, b in texts if a != b)


def _mean_of_outputs(s: Numbers, o: Numbers, weight: Numbers) -> Numbers:
    return np.asarray((o / s[:, None] * weight[:, None]).sum(axis=0) / weight.sum())


def _scaled(weight: Callable[[Numbers], Numbers]) -> Answer:
    """A merge with these weights of the splits, right in all else."""

    def answer(m: Numbers, s: Numbers, o: Numbers) -> Numbers:
        w = weight(m)
        return np.asarray((o * w[:, None]).sum(axis=0) / (s * w).sum())

    return answer


def _weights(m: Numbers) -> Numbers:
    return np.asarray(2.0 ** (m - m.max()))


def _in_turn(old: bool, new: bool) -> Answer:
    """A merge of one split after another; only the old sum or only the new split is scaled."""

    def answer(m: Numbers, s: Numbers, o: Numbers) -> Numbers:
        top, total, out = m[0], s[0], o[0]
        for mi, si, oi in zip(m[1:], s[1:], o[1:], strict=True):
            before, top = top, max(top, mi)
            scale_old = 2.0 ** (before - top) if old else 1.0
            scale_new = 2.0 ** (mi - top) if new else 1.0
            total, out = total * scale_old + si * scale_new, out * scale_old + oi * scale_new
        return np.asarray(out / total)

    return answer


_MERGE_MISTAKES = (
    Mistake(
        lambda m, s, o: (o / s[:, None]).mean(axis=0),
        "that is the mean of the splits' outputs. A split with larger scores, or more keys, must "
        "count more: what do m and s say about it?",
    ),
    Mistake(
        lambda m, s, o: o.sum(axis=0) / s.sum(),
        "each split has subtracted its own maximum. Before they are added, s and o of all splits "
        "must refer to the same one.",
    ),
    Mistake(
        _scaled(lambda m: 2.0**m),
        "right on paper, but 2^m overflows for large scores. Which number can be subtracted from "
        "every m without changing the quotient?",
    ),
    Mistake(
        _scaled(lambda m: 2.0 ** (m - m.min())),
        "the smallest m is subtracted. With a split far above it, 2 to the power of the difference "
        "overflows. Which m leaves nothing above 0?",
    ),
    Mistake(
        _scaled(lambda m: 2.0 ** (m - m[0])),
        "the first split's m is subtracted, and a later one may be far larger: its power of 2 "
        "overflows. Take the one that none is larger than.",
    ),
    Mistake(
        _scaled(lambda m: 2.0 ** (m - m[-1])),
        "the last split's m is subtracted, and an earlier one may be far larger. Nothing says that "
        "maxima grow along the sequence.",
    ),
    Mistake(
        _scaled(lambda m: 2.0 ** (m - m.mean())),
        "the mean of all m, or another middle, is subtracted. One split far above the others is "
        "still far above it, and its power of 2 overflows.",
    ),
    Mistake(
        _scaled(lambda m: 2.0 ** (m.max() - m)),
        "the sign is turned round: the split with the smallest scores counts most. A factor "
        "2^(m - M) is at most 1.",
    ),
    Mistake(
        lambda m, s, o: (o * _weights(m)[:, None]).sum(axis=0) / s.sum(),
        "o is brought to a common maximum, and s is not. Both were made with the split's own.",
    ),
    Mistake(
        lambda m, s, o: (o * _weights(m)[:, None]).sum(axis=0),
        "it is not divided. o is a sum of weights times values; what are the weights together?",
    ),
    Mistake(
        lambda m, s, o: (o * (s * _weights(m))[:, None]).sum(axis=0) / (s * _weights(m)).sum(),
        "o is multiplied with s, so the weights count twice: o[i] is a sum over the split's keys "
        "already. Only the factor 2^(m - M) belongs to it.",
    ),
    Mistake(
        lambda m, s, o: (
            (o / s[:, None] * _weights(m)[:, None]).sum(axis=0) / (s * _weights(m)).sum()
        ),
        "it is divided twice, by each split's s and by the sum over all. Once is enough, at the "
        "end.",
    ),
    Mistake(
        _scaled(lambda m: np.exp(m - m.max())),
        "that is a power of e. The scores here are in base 2, since the kernel has exp2.",
    ),
    Mistake(
        lambda m, s, o: _mean_of_outputs(s, o, _weights(m)),
        "the weight of a split is its whole sum, s times 2^(m - M), and not the weight of its "
        "largest key. Bring o and s to one maximum, add them, and divide once.",
    ),
    Mistake(
        lambda m, s, o: _mean_of_outputs(s, o, 2.0**m),
        "2^m overflows for large scores; and a split's own output, o / s, would have to count by "
        "its whole sum, not by its largest key. Divide once, at the end.",
    ),
    Mistake(
        lambda m, s, o: (o * _weights(m)).sum(axis=0) / (s * _weights(m)).sum(),
        "o is [n, D] and the weights are [n]: NumPy sets the last axes side by side, D beside n. "
        "`weight[:, None]` is [n, 1], a factor for each row of o.",
    ),
    Mistake(
        lambda m, s, o: (o * _weights(m)[:, None]).sum() / (s * _weights(m)).sum(),
        "`sum()` adds splits and dimensions, and one number is left. The splits alone are axis 0.",
    ),
    Mistake(
        lambda m, s, o: (o * _weights(m)[:, None]).sum(axis=1) / (s * _weights(m)).sum(),
        "axis 1 are the dimensions, and they must stay. The splits, which are added, are axis 0.",
    ),
    Mistake(
        lambda m, s, o: (
            (o * _weights(m)[:, None]).sum(axis=0, keepdims=True) / (s * _weights(m)).sum()
        ),
        "the numbers may be right, but an axis of length 1 is left of the splits. It is `keepdims` "
        "or a slice such as `[:1]` that keeps it.",
    ),
    Mistake(
        _in_turn(old=True, new=False),
        "that is the rescaling between two chunks, which scales the old sum only. There the new "
        "chunk's weights are made after the common maximum is known. A split has been made with "
        "its own m: if that is the smaller one, the new split is to be scaled, too.",
    ),
    Mistake(
        _in_turn(old=False, new=True),
        "each new split is brought to the largest maximum so far, but what was added before still "
        "refers to an earlier one. Scale the old sum, too, or find the largest m first.",
    ),
    Mistake(
        lambda m, s, o: (o / s[:, None]).sum(axis=0),
        "that adds the splits' outputs, as if each had all the keys. They are parts of one "
        "softmax: add what stands above the line and what stands below it, and divide then.",
    ),
    Mistake(
        lambda m, s, o: (o / s[:, None] * _weights(m)[:, None]).sum(axis=0),
        "each split is divided by its own sum, and then there is no division by the sum over all. "
        "Leave o undivided until everything is added.",
    ),
    Mistake(
        _scaled(lambda m: 2.0 ** np.minimum(m, 1000.0)),
        "cutting large m off keeps 2^m finite, but then splits above the limit all count the same, "
        "and far below 0 every weight is 0. Subtract something from all m instead.",
    ),
    Mistake(
        _scaled(lambda m: 2.0 ** np.clip(m, -1000.0, 1000.0)),
        "with m cut off at both ends nothing overflows, but splits beyond the limits all count the "
        "same. Differences between the m must stay: subtract one number from all.",
    ),
)


EXERCISES = (
    PythonExercise(
        id="05.2",
        solution=merge,
        properties=(
            Property("one split", _merged("one split", (7,))),
            Property("two splits", _merged("two splits", (128, 40))),
            Property("nine splits", _merged("nine splits", (30, *7 * (128,), 1))),
            Property("large scores", _merged("scores near 2000", (9, 9, 9), *3 * (2000.0,))),
            Property("small scores", _merged("scores near -2000", (4, 4, 4, 4), *4 * (-2000.0,))),
            Property("the second far larger", _merged("scores near 0, 1200", (9, 9), 0, 1200.0)),
            Property("the first far larger", _merged("scores near 1200, 0", (9, 9), 1200.0, 0)),
            Property("one of four far larger", _merged("one near 1600", (9,) * 4, 0, 1600.0, 0, 0)),
        ),
        mistakes=_MERGE_MISTAKES,
        then="Now: in which order does the kernel add the splits, and why must one be fixed?",
    ),
)
