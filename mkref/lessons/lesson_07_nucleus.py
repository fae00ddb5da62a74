"""Lesson 07: exercise 07.3, which tokens top-p keeps.

Right is what `mkref.reference.drawing` keeps, so the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.lesson_07_model import next_logits
from mkref.reference.drawing import Rules, kept, masses
from mkref.reference.scalars import F32

__all__ = ["EXERCISES", "nucleus"]


def nucleus(mass: Sequence[int], target: int) -> list[bool]:
    """Which tokens top_p keeps: a list with True or False for each token.

    `mass` has the probability of each token as a whole number. The most likely tokens are kept, as
    few as can be, whose masses add up to `target` or more. Tokens of equal mass are kept together
    or left out together.
    """
    # BEGIN SOLUTION
    total, least = 0, 0
    for one in sorted(mass, reverse=True):
        if total >= target:
            break
        total += one
        least = one
    return [one >= least for one in mass]
    # END SOLUTION


def _keeps(where: str, mass: Sequence[int], target: int) -> Callable[[Answer], None]:
    return lambda answer: _compare(answer, where, mass, target, nucleus(mass, target))


def _compare(
    answer: Answer, where: str, mass: Sequence[int], target: int, right: Sequence[bool]
) -> None:
    given = answer(list(mass), target)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    got = list(given) if isinstance(given, list | tuple | np.ndarray) else []
    if len(got) != len(mass) or not all(isinstance(one, bool | np.bool_) for one in got):
        raise WrongAnswerError(
            f"{where}: it returns {_short(given)}, and not {len(mass)} booleans, "
            "True or False for each token in the order of `mass`"
        )
    n, n_right = sum(map(int, got)), sum(right)
    you = f"you keep {n} tokens, right are {n_right}" + (" others" if n == n_right else "")
    for i, (keep, said) in enumerate(zip(right, got, strict=True)):
        if keep != said:
            raise WrongAnswerError(
                f"{where}: token {i} of mass {mass[i]:,} must be "
                f"{'kept' if keep else 'left out'} ({you})"
            )


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 40 else f"{text[:36]} ..."


def _order(answer: Answer) -> None:
    rng = np.random.default_rng(5)
    mass = [int(one) for one in rng.integers(1, 40, 60)]
    for _ in range(4):
        mass = [mass[i] for i in rng.permutation(60)]
        _compare(answer, "60 tokens, shuffled", mass, 700, nucleus(mass, 700))


def _exact(answer: Answer) -> None:
    """Sums that are the target, of which fractions make a little less or more."""
    rng = np.random.default_rng(6)
    for _ in range(300):
        mass = [int(one) for one in rng.integers(1, 50, 8)]
        target = sum(sorted(mass, reverse=True)[: int(rng.integers(1, 8))])
        _compare(answer, f"masses {mass}, target {target}", mass, target, nucleus(mass, target))


def _small(answer: Answer) -> None:
    """Masses that a float32 sum does not see beside the largest."""
    mass = [2**40, *(2**14 - i for i in range(400))]
    target = sum(mass[:200])
    _compare(answer, "one large and 400 small masses", mass, target, nucleus(mass, target))


def _trained(answer: Answer) -> None:
    for temperature, top_p in ((0.5, 0.9), (1.0, 0.5), (1.0, 0.9), (2.0, 0.95)):
        z = (next_logits() / F32(temperature)).astype(F32)
        mass = [int(one) for one in masses(z)[1]]
        target = max(1, sum(mass) * int(F32(top_p) * F32(2.0**32)) >> 32)
        right = [bool(one) for one in kept(z, Rules(temperature=temperature, top_p=top_p))]
        where = f"nano, temperature {temperature:g}, top_p {top_p:g}"
        _compare(answer, where, mass, target, right)


def _sorted_until(mass: Sequence[int], done: Callable[[int, int], bool]) -> int:
    """The mass of the last token kept, if `done(total before, next)` says where it ends."""
    total, least = 0, 0
    for one in sorted(mass, reverse=True):
        if done(total, one) and one != least:
            break
        total, least = total + one, one
    return least


def _cut_by_number(mass: Sequence[int], target: int) -> list[bool]:
    ids, total, keep = sorted(range(len(mass)), key=lambda i: -mass[i]), 0, [False] * len(mass)
    for i in ids:
        if total >= target:
            break
        total, keep[i] = total + mass[i], True
    return keep


def _in_float32(mass: Sequence[int], target: int) -> list[bool]:
    total, least = F32(0), 0
    for one in sorted(mass, reverse=True):
        if total >= F32(target) and one != least:
            break
        total, least = F32(total + F32(one)), one
    return [one >= least for one in mass]


def _by_id(mass: Sequence[int], target: int) -> list[bool]:
    total, keep = 0, []
    for one in mass:
        keep.append(total < target)
        total += one
    return keep


def _from_below(mass: Sequence[int], target: int) -> list[bool]:
    total, most = 0, 0
    for one in sorted(mass):
        if total >= target and one != most:
            break
        total, most = total + one, one
    return [one <= most for one in mass]


def _until(done: Callable[[int, int, int], bool]) -> Answer:
    def answer(mass: Sequence[int], target: int) -> list[bool]:
        least = _sorted_until(mass, lambda total, one: done(total, one, target))
        return [one >= least for one in mass]

    return answer


def _cut(mass: Sequence[int], target: float, unit: float = 1) -> list[bool]:
    total, least = 0.0, 0
    for one in sorted(mass, reverse=True):
        if total >= target:
            break
        total, least = total + one / unit, one
    return [one >= least for one in mass]


def _in_fractions(mass: Sequence[int], target: int) -> list[bool]:
    return _cut(mass, target / sum(mass), sum(mass))


def _none_at_the_end(mass: Sequence[int], target: int) -> list[bool] | None:
    total, least = 0, 0
    for one in sorted(mass, reverse=True):
        if total >= target:
            return [other >= least for other in mass]
        total, least = total + one, one
    return None


def _next_one(mass: Sequence[int], target: int) -> list[bool]:
    ordered, total, n = sorted(mass, reverse=True), 0, 0
    while total < target:
        total, n = total + ordered[n], n + 1
    first_out = ordered[n]
    return [one > first_out or one >= ordered[n - 1] for one in mass]


def _in_sorted_order(mass: Sequence[int], target: int) -> list[bool]:
    return nucleus(sorted(mass, reverse=True), target)


def _each_value_once(mass: Sequence[int], target: int) -> list[bool]:
    total, least = 0, 0
    for one in sorted(set(mass), reverse=True):
        if total >= target:
            break
        total, least = total + one, one
    return [one >= least for one in mass]


def _ties_left_out(mass: Sequence[int], target: int) -> list[bool]:
    keep = _cut_by_number(mass, target)
    left_out = {one for one, kept_ in zip(mass, keep, strict=True) if not kept_}
    return [kept_ and one not in left_out for one, kept_ in zip(mass, keep, strict=True)]


def _numbers_of_kept(mass: Sequence[int], target: int) -> list[int]:
    return [i for i, keep in enumerate(nucleus(mass, target)) if keep]


_NUCLEUS = PythonExercise(
    id="07.3",
    solution=nucleus,
    properties=(
        Property("in the middle of a token", _keeps("target 60", [50, 10, 25, 15], 60)),
        Property("reached exactly", _keeps("target 75", [10, 50, 25, 15], 75)),
        Property("reached exactly, whatever the sum", _exact),
        Property("all of them are kept", _keeps("target 100", [30, 20, 40, 10], 100)),
        Property("one token is enough", _keeps("target 1", [3, 90, 7], 1)),
        Property("equal masses together", _keeps("target 55", [20, 40, 20, 20], 55)),
        Property("the order of the vocabulary does not matter", _order),
        Property("small masses count", _small),
        Property("what the sampler keeps of a trained model's next token", _trained),
    ),
    mistakes=(
        Mistake(
            _until(lambda total, one, target: total + one > target and total > 0),
            "the token that crosses the target is left out, so the kept ones add up to less. Keep "
            "it, and stop after it.",
        ),
        Mistake(
            _until(lambda total, one, target: total > target),
            "one token too many when the target is reached exactly: `target` or more is enough.",
        ),
        Mistake(
            _cut_by_number,
            "of equal masses some are kept and some are not, by their place in the vocabulary. "
            "Which token would be banned by accident of its number?",
        ),
        Mistake(
            _in_float32,
            "float32 has 24 bits: beside a large sum, small masses vanish and are never counted. "
            "Add whole numbers.",
        ),
        Mistake(
            lambda mass, target: [one >= target for one in mass],
            "that asks of each token to reach the target alone. It is their sum that must.",
        ),
        Mistake(
            _by_id,
            "tokens are taken in the order of the vocabulary. The most likely come first.",
        ),
        Mistake(
            _from_below,
            "this begins with the least likely token. Sort the other way round.",
        ),
        Mistake(
            _in_fractions,
            "fractions round: a sum that is the target exactly comes out a little below it, and "
            "one token more is kept. Add the whole numbers themselves.",
        ),
        Mistake(
            _none_at_the_end,
            "it returns inside the loop only, so nothing comes back when all tokens are kept. "
            "Return behind the loop.",
        ),
        Mistake(
            _next_one,
            "it looks at the first token that is left out, and when all are kept there is none. "
            "Remember the last one kept.",
        ),
        Mistake(
            _in_sorted_order,
            "the booleans are those of the sorted masses. They belong to the tokens in the order "
            "of `mass`, which mass.sort() would change; sorted(mass) makes a new list.",
        ),
        Mistake(
            _each_value_once,
            "equal masses are added once, and each of these tokens has its own. Add all of them.",
        ),
        Mistake(
            _until(lambda total, one, target: False),
            "everything is kept: the sum never reaches what you compare it with. `target` is a sum "
            "of masses already, and no share of it; stop when those before have reached it.",
        ),
        Mistake(
            _ties_left_out,
            "the token that reaches the target is needed, and its equals with it: keep them "
            "together, do not leave them out together.",
        ),
        Mistake(
            _numbers_of_kept,
            "these are the numbers of the tokens that are kept. Give True or False for each token.",
        ),
        Mistake(
            lambda mass, target: [int(one) for one in nucleus(mass, target)],
            "the right tokens, as 0 and 1. Give True and False: `one >= least` is one of them.",
        ),
    ),
    then="Now: `draw_weigh` adds masses with atomics, in any order. Why is that allowed here?",
)

EXERCISES = (_NUCLEUS,)
