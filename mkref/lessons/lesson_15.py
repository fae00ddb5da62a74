"""Lesson 15: two of its exercises, how sure a ratio of two series is that ran in turns, and which
share of the bound a step reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import comb, inf, isfinite, sqrt
from statistics import mean, median, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np

from mkref.config import NORTH_MINI_CODE
from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
    expect,
)

__all__ = ["EXERCISES", "interval", "share_of_bound", "step_like"]

Series = Sequence[float]


def interval(a: Series, b: Series) -> tuple[float, float]:
    """Between which numbers the ratio b / a lies, with a confidence of at least 95 %.

    `a` and `b` are times of two programs that ran in turns: a[i] and b[i] are from turn i. The
    result is (low, high): of the sorted ratios of the turns, as many are left out at either end as
    the confidence allows. If it allows none to stand at the ends, the result is (0, infinity).
    """
    # BEGIN SOLUTION
    from math import comb, inf

    ratios = sorted(after / before for before, after in zip(a, b, strict=True))
    n = len(ratios)
    k, missed = 0, 2 / 2**n  # the chance that all ratios lie on one side of the true one
    while missed <= 0.05:
        k += 1
        missed += 2 * comb(n, k) / 2**n
    if k == 0:
        return 0.0, inf  # too few turns
    return ratios[k - 1], ratios[n - k]
    # END SOLUTION


def share_of_bound(step: Any, ms: float, gb_per_s: float) -> float:
    """Which part of its time a step would take if it did nothing but move its bytes.

    step.always: bytes of the weights that every step reads.
    step.expert: bytes of one expert of one layer.
    step.chosen: for each layer with experts, for each row, the numbers of the experts it chose.
    step.n_experts: experts of a layer.
    step.kv: for each row, bytes of its keys and values.
    The step took `ms` milliseconds; memory has `gb_per_s`, of 10^9 bytes. The result is a fraction.
    """
    # BEGIN SOLUTION
    hit = sum(len({e for row in layer for e in row}) for layer in step.chosen)
    n_bytes = step.always + hit * step.expert + sum(step.kv)
    return n_bytes / (gb_per_s * 1e9) / (ms / 1e3)
    # END SOLUTION


# ---- exercise 15.1: a ratio of two series --------------------------------------------------------


def _in_turns(
    n: int, ratio: float, *, drift: float = 0.0, noise: float = 0.002, seed: int = 0
) -> tuple[list[float], list[float]]:
    """Two series of n turns, b in the mean `ratio` times a; both drift by a fraction `drift`."""
    rng = np.random.default_rng([15, n, seed])
    level = 2.0 * (1 + drift * np.linspace(1, 0, n))
    a = level * (1 + rng.normal(0, noise, n))
    b = level * ratio * (1 + rng.normal(0, noise, n))
    return [round(float(x), 5) for x in a], [round(float(x), 5) for x in b]


def _text(pair: tuple[float, float]) -> str:
    return " to ".join(
        f"{x:.5g}" if isfinite(x) else f"{'minus ' if x < 0 else ''}infinity" for x in pair
    )


def _between(where: str, a: list[float], b: list[float]) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        given, right = answer([*a], [*b]), interval(a, b)
        if given is None:
            raise WrongAnswerError(f"it returns None, {EMPTY}")
        try:
            low, high = (float(x) for x in given)
        except (TypeError, ValueError):
            raise WrongAnswerError(f"{where}: it must return two numbers, low and high") from None
        if not all(
            x == y or abs(x - y) <= 1e-9 * abs(y) for x, y in zip((low, high), right, strict=True)
        ):
            raise WrongAnswerError(
                f"{where}: {_text(right)} is right, it returns {_text((low, high))}"
            )

    return trial


def _ratios(a: Series, b: Series) -> list[float]:
    return sorted(after / before for before, after in zip(a, b, strict=True))


def _ends(ratios: list[float], sides: int = 2, less: int = 1) -> tuple[float, float]:
    """The interval with a chance counted on so many sides; `less` is 1 for the right ends."""
    n = len(ratios)
    k, missed = 0, sides / 2**n
    while missed <= 0.05:
        k += 1
        missed += sides * comb(n, k) / 2**n
    return (ratios[k - less], ratios[n - 1 + less - k]) if k else (0.0, inf)


def _normal(a: Series, b: Series) -> tuple[float, float]:
    ratios = _ratios(a, b)
    half = 1.96 * stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else 0.0
    return mean(ratios) - half, mean(ratios) + half


def _one_chance(a: Series, b: Series) -> tuple[float, float]:
    """The last chance alone is held against 5 %, and not the sum."""
    ratios, n = _ratios(a, b), len(a)
    k = next(k for k in range(n + 1) if 2 * comb(n, k) / 2**n > 0.05)
    return (ratios[k - 1], ratios[n - k]) if k else (0.0, inf)


def _one_too_few(a: Series, b: Series) -> tuple[float, float]:
    """One ratio nearer to the ends than allowed, where there is one."""
    ratios = _ratios(a, b)
    if len(ratios) < 6:
        return 0.0, inf
    right = _ends(ratios)
    at = max(ratios.index(right[0]) - 1, 0)
    return ratios[at], ratios[len(ratios) - 1 - at]


_OUTLIER = _in_turns(16, 0.99, seed=3)
_OUTLIER[1][5] *= 2  # another process came in between

_INTERVAL = PythonExercise(
    id="15.1",
    solution=interval,
    properties=(
        Property("ten turns", _between("10 turns", *_in_turns(10, 0.97, noise=0.004))),
        Property(
            "a drift that both have",
            _between("12 turns, all 10 % faster at the end", *_in_turns(12, 0.99, drift=0.1)),
        ),
        Property("no difference", _between("14 turns of equals", *_in_turns(14, 1.0))),
        Property("one turn disturbed", _between("16 turns, one of b twice as long", *_OUTLIER)),
        Property("b is slower", _between("9 turns", *_in_turns(9, 1.05))),
        Property("just enough turns", _between("6 turns", *_in_turns(6, 0.9))),
        Property("too few turns", _between("5 turns", *_in_turns(5, 0.5))),
        Property("hardly any", _between("2 turns", *_in_turns(2, 0.5))),
    ),
    mistakes=(
        Mistake(
            lambda a, b: _ends(_ratios(b, a)),
            "upside down: b / a is below 1 where b is the faster one.",
        ),
        Mistake(
            lambda a, b: _ends(_ratios(sorted(a), sorted(b))),
            "a and b are sorted each for itself, so a ratio mixes two turns. What both have in "
            "common in a turn, such as the clock, cancels only if it stays together.",
        ),
        Mistake(
            lambda a, b: (min(b) / mean(a),) * 2,
            "the best of one against the mean of the other: two equal programs would differ, too.",
        ),
        Mistake(
            lambda a, b: (min(b) / max(a), max(b) / min(a)),
            "smallest and largest time of different turns are divided, so everything that changed "
            "from turn to turn is in the result. Divide within a turn, then look at the ratios.",
        ),
        Mistake(
            lambda a, b: (median(b) / median(a),) * 2,
            "that is one number. How far might it be off, and with two turns as with ten?",
        ),
        Mistake(
            lambda a, b: (_ratios(a, b)[0], _ratios(a, b)[-1]),
            "smallest to largest, always. With few turns both can lie on one side of the true "
            "ratio by chance; with many, one disturbed turn sets the width.",
        ),
        Mistake(
            _normal,
            "mean and standard deviation: one disturbed turn moves both. Use the order of the "
            "ratios alone, and see that two turns tell nothing.",
        ),
        Mistake(
            lambda a, b: _ends(_ratios(a, b), sides=1),
            "the true ratio may be missed on either side: the chance counts twice.",
        ),
        Mistake(
            lambda a, b: _ends(_ratios(a, b), less=0),
            "one ratio too many is left out at each end. While the chance of missing is still "
            "allowed, the k-th ratio from the end may stand; the next one may not.",
        ),
        Mistake(
            _one_too_few,
            "one ratio too few is left out at each end. Ten turns: the sums are 0.2 %, 2.1 % and "
            "11 %; two of them are allowed, so the second ratio from each end stands.",
        ),
        Mistake(
            _one_chance,
            "only the last chance is held against 5 %. The chances of all ratios that were left "
            "out before it count as well: add them up.",
        ),
        Mistake(
            lambda a, b: _normal(a, b) if len(a) > 5 else (0.0, inf),
            "a bell curve, for enough turns at least; but one disturbed turn moves its middle and "
            "its width. Take two of the sorted ratios themselves.",
        ),
        Mistake(
            lambda a, b: _ends(_ratios(a, b)) if len(a) > 5 else (-inf, inf),
            "a ratio of two times is never below 0: with too few turns low is 0.",
        ),
    ),
    then="Now the ladder, with this function. Which of its gains will still be there?",
)


# ---- exercise 15.2: bytes of a step --------------------------------------------------------------


def step_like(
    rows: int, context: int, *, layers: int = 48, n_experts: int = 128, seed: int = 0
) -> SimpleNamespace:
    """A step of the large geometry whose rows choose eight experts each, at random."""
    rng = np.random.default_rng([layers, rows, seed])
    north = NORTH_MINI_CODE
    chosen = [
        [sorted(rng.choice(n_experts, 8, replace=False).tolist()) for _ in range(rows)]
        for _ in range(layers)
    ]
    return SimpleNamespace(
        always=2 * north.shared_parameters(),
        expert=2 * north.expert_parameters,
        chosen=chosen,
        n_experts=n_experts,
        kv=[north.kv_bytes(context * (row + 1) // rows) for row in range(rows)],
    )


def _alike(rows: int, context: int) -> SimpleNamespace:
    """A step whose rows are equally long, as those of the record are."""
    step = step_like(rows, context)
    return SimpleNamespace(**{**vars(step), "kv": [max(step.kv)] * rows})


_SMALL = SimpleNamespace(
    always=1000, expert=50, chosen=[[[0, 1], [1, 2]], [[3, 0], [0, 3]], [[5, 6], [7, 2]]],
    n_experts=16, kv=[300, 40],
)  # fmt: skip
_SAMPLES = (
    (_SMALL, 1e-3, 2.0),
    (step_like(1, 8192), 1.8, 4814.0),
    (step_like(4, 3000), 4.5, 4814.0),
    (step_like(8, 65536, seed=1), 12.0, 3350.0),
    (_alike(2, 8192), 2.7, 4814.0),
    (_SMALL, 5e-4, 2.0),
)


def _bytes(step: Any, hit: float, kv: int | None = None, always: int = 1) -> float:
    """With the weights that every step reads so many times."""
    return float(always * step.always + hit * step.expert + (sum(step.kv) if kv is None else kv))


def _hit(step: Any) -> int:
    return sum(len({e for row in layer for e in row}) for layer in step.chosen)


def _share(n_bytes: float, ms: float, gb_per_s: float, unit: float = 1e9) -> float:
    return n_bytes / (gb_per_s * unit) / (ms / 1e3)


def _all_layers(step: Any) -> int:
    return len({e for layer in step.chosen for row in layer for e in row})


def _expected(step: Any) -> float:
    rows, k = len(step.chosen[0]), len(step.chosen[0][0])
    return float(len(step.chosen) * step.n_experts * (1 - (1 - k / step.n_experts) ** rows))


def _shares(where: str, case: tuple[Any, float, float]) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        given = answer(deepcopy(case[0]), *case[1:])  # an answer may use the step up
        if isinstance(given, SimpleNamespace):
            raise WrongAnswerError(f"{where}: it returns the step itself, and must give a number")
        expect(share_of_bound(*case), given, where, tolerance=1e-9)

    return trial


_SHARE = PythonExercise(
    id="15.2",
    solution=share_of_bound,
    properties=(
        Property("a step that can be added up by hand", _shares("the small step", _SAMPLES[0])),
        Property("one row", _shares("one row of 8,192 tokens", _SAMPLES[1])),
        Property("rows of several lengths", _shares("four rows", _SAMPLES[2])),
        Property("another memory", _shares("eight rows, 3,350 GB/s", _SAMPLES[3])),
        Property("rows of equal length", _shares("two rows of 8,192 tokens", _SAMPLES[4])),
        Property("a time too short to be true", _shares("the small step in half", _SAMPLES[5])),
    ),
    mistakes=(
        Mistake(
            lambda s, t, g: _share(_bytes(s, len(s.chosen) * s.n_experts), t, g),
            "all experts are counted. Memory delivers those that some row chose.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, sum(len(r) for c in s.chosen for r in c)), t, g),
            "an expert that two rows chose is read once. Count different ones.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _expected(s)), t, g),
            "that is the number to be expected if rows choose by chance. Here it is known which "
            "ones they chose: count them.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _all_layers(s)), t, g),
            "expert 3 of one layer and expert 3 of the next are two experts. Count layer by layer.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _hit(s), 0), t, g),
            "keys and values are missing.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _hit(s), s.kv[0]), t, g),
            "these are the keys and values of the first row. Each row has its own.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _hit(s)), t, g, 2**30),
            "a data sheet's GB has 10^9 bytes; 2^30 is a GiB.",
        ),
        Mistake(
            lambda s, t, g: 1 / _share(_bytes(s, _hit(s)), t, g),
            "upside down: the bound is the shorter of the two times, so a share is below 1 "
            "unless a number is wrong.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _hit(s)), t, g) / 1e3,
            "a factor of 1,000 is lost: ms is in milliseconds, GB/s is per second.",
        ),
        Mistake(
            lambda s, t, g: min(1.0, _share(_bytes(s, _hit(s)), t, g)),
            "a share above 1 is cut off. It tells that a number is wrong: let it be seen.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _hit(s), sum(set(s.kv))), t, g),
            "two rows of equal length are counted once. Their keys and values are not the same: "
            "add up the list, without a set.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _hit(s), max(s.kv)), t, g),
            "only the longest row's keys and values are counted. All rows' are read: add them up.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _hit(s), None, 0), t, g),
            "`step.always` is missing: the weights that every step reads.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _hit(s), None, len(s.kv)), t, g),
            "`step.always` is counted once per row. A step reads it once, for all rows together.",
        ),
        Mistake(
            lambda s, t, g: 100 * _share(_bytes(s, _hit(s)), t, g),
            "that is in percent. A fraction is asked for: 0.5 for a half.",
        ),
        Mistake(
            lambda s, t, g: _share(_bytes(s, _hit(s)), t, 1.0),
            "`gb_per_s` is not divided by: bytes over bandwidth is the time of the bound.",
        ),
    ),
    samples=_SAMPLES,
    then="Now: which of these mistakes would make your kernel look better?",
)


EXERCISES = (_INTERVAL, _SHARE)
