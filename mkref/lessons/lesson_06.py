"""Lesson 06: its exercises, the experts of a row, the runs of an SM, and the weighted sum in DOWN.

The first is tried on numbers made here, the third inside the kernel that runs; the second has a
module of its own, `lesson_06_runs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mkref.lessons.cuda_exercise import Blank, CudaExercise, Patch
from mkref.lessons.exercise import (
    EMPTY,
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
)
from mkref.lessons.lesson_06_runs import RUNS

if TYPE_CHECKING:
    from mkref.lessons.program import Program

__all__ = ["EXERCISES", "route"]

Pair = tuple[int, float]


def route(logits: Sequence[float], k: int, norm: bool) -> list[Pair]:
    """The experts of one row: a list of k pairs (expert, score), the lowest expert first.

    The k largest logits are chosen; of equal ones the lower expert. The score of an expert is
    1 / (1 + e^-x) of its logit x. If `norm`, the k scores are divided by their sum.
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
    given = answer([*logits], k, norm)
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    if not isinstance(given, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in given
    ):
        raise WrongAnswerError(f"{where}: it must return a list of pairs (expert, score)")
    if len(given) != k:
        raise WrongAnswerError(f"{where}: it returns {len(given)} pairs, {k} are right")
    return [(int(expert), float(score)) for expert, score in given]


def _routed(where: str, logits: Sequence[float], k: int, *, norm: bool) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        right = route(logits, k, norm)
        given = _pairs(answer, logits, k, norm, where)
        ids = [expert for expert, _ in right]
        if (chosen := [expert for expert, _ in given]) != ids:
            raise WrongAnswerError(f"{where}: the experts are {ids}, it returns {chosen}")
        for (expert, score), (_, got) in zip(right, given, strict=True):
            if not abs(score - got) <= 1e-9:
                raise WrongAnswerError(
                    f"{where}: the score of expert {expert} is {score:.6f}, it returns {got:.6f}"
                )

    return trial


def _logits(n: int, seed: int) -> list[float]:
    drawn: list[float] = np.random.default_rng([6, seed]).normal(0, 1.5, n).round(3).tolist()
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


_ROUTE = PythonExercise(
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
            "of equal logits the higher expert wins. The rule says the lower one; any rule will "
            "do, but all SMs must have the same.",
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
    ),
    then="Now look at `find_experts`, below: where is its rule for ties?",
)


def _down(layer: int, rows: int, n_sm: int, seed: int = 0) -> Callable[[Program], None]:
    def trial(program: Program) -> None:
        from mkref.lessons.steps import run_op
        from mkref.plan import Op

        run_op(program, Op.DOWN, layer=layer, rows=rows, n_sm=n_sm, seed=seed)

    return trial


_LOW = "sums.v[t][i] = sums.v[t][i] + s * part.v[t][i];"
_HIGH = "sums.v[t][i + 2] = sums.v[t][i + 2] + s * part.v[t][i + 2];"
_SUM = CudaExercise(
    id="06.3",
    answer="add_expert",
    file="megakernel.cu",
    function="add_expert",
    blanks=(Blank("const int row =", "sums.v[t][i + 2] ="),),
    properties=(
        Property("a dense layer: one expert, score 1", _down(0, 3, 2)),
        Property("one row, three experts", _down(1, 1, 2)),
        Property("three rows", _down(2, 3, 2, seed=1)),
        Property("six rows on three SMs", _down(4, 6, 3)),
    ),
    mistakes=(
        Patch(
            "2 * c.quad + i;",
            "c.group;",
            "c.group is this lane's column of operand B. In the sums, a lane has the columns "
            "2 * c.quad and 2 * c.quad + 1.",
        ),
        Patch(
            _HIGH,
            "",
            "half of the outputs get nothing. A lane has four sums per n tile: outputs c.group and "
            "c.group + 8, two columns each.",
        ),
        Patch(
            _LOW,
            "sums.v[t][i] = sums.v[t][i] + part.v[t][i];",
            "all experts count the same. Where does the row's score come in?",
            more=((_HIGH, "sums.v[t][i + 2] = sums.v[t][i + 2] + part.v[t][i + 2];"),),
        ),
        Patch(
            _LOW,
            "sums.v[t][i] = s * part.v[t][i];",
            "each expert replaces the ones before it. Only the last one of a row is left.",
            more=((_HIGH, "sums.v[t][i + 2] = s * part.v[t][i + 2];"),),
        ),
        Patch(
            _LOW,
            "sums.v[t][2 * i] = sums.v[t][2 * i] + s * part.v[t][2 * i];",
            "registers 0 and 1 are two columns of one output; 2 and 3 are the same two columns, "
            "eight outputs further. So rows are told apart by i, outputs by + 2.",
            more=(
                (
                    _HIGH,
                    "sums.v[t][2 * i + 1] = sums.v[t][2 * i + 1] + s * part.v[t][2 * i + 1];",
                ),
            ),
        ),
        Patch(
            _LOW,
            "sums.v[t][i] = s * (sums.v[t][i] + part.v[t][i]);",
            "the score is applied to what was added before, too. It belongs to this expert alone.",
            more=((_HIGH, "sums.v[t][i + 2] = s * (sums.v[t][i + 2] + part.v[t][i + 2]);"),),
        ),
    ),
    then="Now: which two loops decide the order of this sum, and could another row change it?",
)

EXERCISES = (_ROUTE, RUNS, _SUM)
