"""Exercise 06.1: the experts of a row, chosen and scored from its logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)

__all__ = ["ROUTE", "route"]

Pair = tuple[int, float]
NEAR = 2e-6
"""Relative difference of scores that is allowed: the kernel's own type, float32, is near enough."""


def route(logits: Sequence[float], k: int, norm: bool) -> list[Pair]:
    """The experts of one row: a list of k pairs (expert, score), the lowest expert first.

    The k largest logits are chosen; of equal ones the lower expert. The score of an expert is
    1 / (1 + e^-x) of its logit x. If `norm`, the k scores are divided by their sum. The caller's
    `logits` stay as they are.
    """
    # BEGIN SOLUTION
    from math import exp

    ranked = sorted(range(len(logits)), key=lambda e: (-logits[e], e))
    chosen = sorted(ranked[:k])
    scores = [1 / (1 + exp(-logits[e])) for e in chosen]
    total = sum(scores) if norm else 1
    return [(e, score / total) for e, score in zip(chosen, scores, strict=True)]
    # END SOLUTION


def _pairs(answer: Answer, logits: Sequence[float], k: int, norm: bool, where: str) -> list[Pair]:
    """What an answer says, if it is k pairs of numbers."""
    own = [*logits]
    given = answer(own, k, norm)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if own != [*logits]:
        raise WrongAnswerError(f"{where}: it changes `logits`, which belong to the caller")
    if not isinstance(given, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in given
    ):
        raise WrongAnswerError(f"{where}: it must return a list of pairs (expert, score)")
    if len(given) != k:
        raise WrongAnswerError(f"{where}: it returns {len(given)} pairs, {k} are right")
    if all(first < 1 and int(first) != first for first, _ in given):
        raise WrongAnswerError(f"{where}: in each pair the expert comes first, then its score")
    return [(int(expert), float(score)) for expert, score in given]


def _why(logits: Sequence[float], ids: list[int], chosen: list[int]) -> str:
    """What is wrong with experts that are not `ids`, if it can be seen."""
    if len({*chosen}) < len(chosen):
        return "; an expert can be taken only once"
    if sorted(chosen) == ids or not all(0 <= expert < len(logits) for expert in chosen):
        return ""
    if sorted(logits[e] for e in chosen) == sorted(logits[e] for e in ids):
        return "; of equal logits the lower expert is right"
    return ""


def _routed(where: str, logits: Sequence[float], k: int, *, norm: bool) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        right = route(logits, k, norm)
        given = _pairs(answer, logits, k, norm, where)
        ids, chosen = [expert for expert, _ in right], [expert for expert, _ in given]
        if chosen != ids:
            why = _why(logits, ids, chosen)
            raise WrongAnswerError(f"{where}: the experts are {ids}, it returns {chosen}{why}")
        scores, found = [score for _, score in right], [score for _, score in given]
        if np.allclose(scores, found, rtol=NEAR, atol=0):
            return
        if np.allclose(sorted(scores), sorted(found), rtol=NEAR, atol=0):
            raise WrongAnswerError(
                f"{where}: the scores are right, but stand beside other experts. Compute them in "
                "the order in which the experts are returned"
            )
        for (expert, score), got in zip(right, found, strict=True):
            if not abs(score - got) <= NEAR * score:
                raise WrongAnswerError(
                    f"{where}: the score of expert {expert} is {score:.9f}, it returns {got:.9f}"
                )

    return trial


def _logits(n: int, seed: int) -> list[float]:
    drawn: list[float] = np.random.default_rng([6, seed]).normal(0, 1.5, n).round(3).tolist()
    return drawn


def _tied(n: int, seed: int) -> list[float]:
    """Logits of four values only."""
    drawn: list[float] = np.random.default_rng([6, seed]).integers(0, 4, n).astype(float).tolist()
    return drawn


def _other_route(
    *, lower: bool = True, by_logit: bool = False, norm: str = "", soft: bool = False,
    saturated: bool = False,
) -> Answer:  # fmt: skip
    """`route` with something else: ties, order, normalisation, weights, or what is compared."""

    def answer(logits: Sequence[float], k: int, given_norm: bool) -> list[Pair]:
        def score(x: float) -> float:
            return math.exp(x - max(logits)) if soft else 1 / (1 + math.exp(-x))

        values = [score(x) for x in logits] if saturated else logits
        ranked = sorted(range(len(logits)), key=lambda e: (-values[e], e if lower else -e))[:k]
        chosen = ranked if by_logit else sorted(ranked)
        total = sum(score(logits[e]) for e in chosen)
        divide = soft or {"": given_norm, "always": True, "never": False}[norm]
        return [(e, score(logits[e]) / (total if divide else 1)) for e in chosen]

    return answer


def _chosen_by(choose: Callable[[list[float], int], list[int]]) -> Answer:
    """`route` with another way to choose."""

    def answer(logits: list[float], k: int, norm: bool) -> list[Pair]:
        chosen = choose(logits, k)
        total = sum(1 / (1 + math.exp(-logits[e])) for e in chosen) if norm else 1
        return [(e, 1 / (1 + math.exp(-logits[e])) / total) for e in chosen]

    return answer


def _from_threshold(logits: list[float], k: int) -> list[int]:
    least = sorted(logits)[-k]
    return [e for e, logit in enumerate(logits) if logit >= least]


def _overwriting(logits: list[float], k: int, norm: bool) -> list[Pair]:
    scored = []
    for _ in range(k):
        best = logits.index(max(logits))
        scored.append((best, 1 / (1 + math.exp(-logits[best]))))
        logits[best] = -math.inf
    total = sum(score for _, score in scored) if norm else 1
    return [(e, score / total) for e, score in sorted(scored)]


def _other_score(score: Callable[[float], float], *, of_all: bool = False) -> Answer:
    """`route` with other scores, or with the sum of all scores."""

    def answer(logits: list[float], k: int, norm: bool) -> list[Pair]:
        chosen = [e for e, _ in route(logits, k, False)]
        scores = [score(logit) for logit in logits]
        total = sum(scores if of_all else [scores[e] for e in chosen]) if norm else 1
        return [(e, scores[e] / total) for e in chosen]

    return answer


def _soft_if_norm(logits: list[float], k: int, norm: bool) -> list[Pair]:
    return _other_route(soft=True)(logits, k, norm) if norm else route(logits, k, norm)


ROUTE = PythonExercise(
    id="06.1",
    solution=route,
    properties=(
        Property("two of six", _routed("two of six", [0.5, -1, 2, 0.25, 1.5, -3], 2, norm=False)),
        Property("8 of 128", _routed("8 of 128", _logits(128, 1), 8, norm=False)),
        Property(
            "equal logits",
            _routed("equal logits", [1, 3, 2, 3, 2, 2, -0.0, 0.0], 3, norm=False),
        ),
        Property(
            "equal logits before a larger one",
            _routed("logits 2, 2, 1, 2, 3, 2, 3", [2, 2, 1, 2, 3, 2, 3], 3, norm=False),
        ),
        Property(
            "many equal logits",
            _routed("128 logits of four values", _tied(128, 3), 8, norm=False),
        ),
        Property(
            "large logits",
            _routed("logits 38 to 60", [60, 41, 38, 52, 38.5, 44, 57, 39], 3, norm=False),
        ),
        Property("normalised", _routed("4 of 16, norm", _logits(16, 2), 4, norm=True)),
    ),
    mistakes=(
        Mistake(
            _other_route(soft=True),
            "these are softmax weights, which add up to 1. Here an expert's score comes from its "
            "own logit alone.",
        ),
        Mistake(
            _other_route(norm="always"),
            "the scores are divided by their sum although `norm` is false, as in this model.",
        ),
        Mistake(
            _other_route(norm="never"),
            "right for North Mini Code, where `norm` is false. Where it is true, the k scores must "
            "add up to 1.",
        ),
        Mistake(
            _other_route(lower=False),
            "of equal logits the higher expert wins. The contract says the lower one, and all SMs "
            "must have the same rule.",
        ),
        Mistake(
            _chosen_by(lambda logits, k: _from_threshold(logits, k)[:k]),
            "the first k that reach the k-th largest logit are not the k largest: a larger logit "
            "may come behind equal ones.",
        ),
        Mistake(
            _chosen_by(_from_threshold),
            "several logits may be equal to the k-th largest, and then more than k reach it.",
        ),
        Mistake(
            _chosen_by(lambda logits, k: sorted(np.argsort(-np.array(logits))[:k].tolist())),
            "by default `argsort` leaves open which of equal numbers comes first. Ask for "
            '`kind="stable"`, or sort by (-logit, expert).',
        ),
        Mistake(
            _chosen_by(lambda logits, k: sorted(map(logits.index, sorted(logits)[-k:]))),
            "`index` finds the first of equal logits each time. Sort the numbers of the experts, "
            "not the logits.",
        ),
        Mistake(
            _overwriting,
            "who is taken may be marked, but in a copy: `logits` belong to the caller.",
        ),
        Mistake(
            _other_route(by_logit=True),
            "the right experts, but the largest logit comes first. Sort what was chosen by "
            "expert: this is the order in which DOWN adds them.",
        ),
        Mistake(
            _other_route(saturated=True),
            "the scores are compared, and not the logits. For large logits all scores are 1, and "
            "then the rule for ties decides.",
        ),
        Mistake(
            _other_score(lambda logit: 1 / (1 + math.exp(logit))),
            "the sign of the exponent: a larger logit must have a larger score.",
        ),
        Mistake(
            _soft_if_norm,
            "to normalise is not a softmax here: the k sigmoids are divided by their sum.",
        ),
        Mistake(
            _other_score(lambda logit: 1 / (1 + math.exp(-logit)), of_all=True),
            "the sum goes over all experts. Only the k that were chosen share the row.",
        ),
    ),
    then="Now look at `find_experts`, below: where is its rule for ties?",
)
