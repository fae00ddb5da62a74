"""Lesson 07: exercise 07.2, a token at a temperature, drawn by noise and one argmax.

Right are the tokens that `mkref.reference.sampling` draws, so those of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
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
    expect,
)
from mkref.lessons.lesson_07_model import softmax
from mkref.reference.sampling import philox, sample
from mkref.reference.scalars import F32

__all__ = ["EXERCISES", "next_token", "uniforms"]

Numbers = npt.NDArray[Any]


def next_token(logits: Numbers, temperature: float, u: Numbers) -> int:
    """The next token of a row: the id of the winner.

    `logits` and `u` are arrays with a number for each token of the vocabulary. The numbers `u` are
    random, evenly spread between 0 and 1, neither of which occurs. Temperature 0 is greedy: the
    largest logit, the lowest id on a tie. Otherwise token i must win with probability
    softmax(logits / temperature)[i], by one argmax with the noise -log(-log(u)). The tokens must
    be those of the kernel: other ways with the same probabilities count as wrong.
    """
    import numpy as np

    # BEGIN SOLUTION
    if temperature == 0:
        return int(np.argmax(logits))
    noise = -np.log(-np.log(u))
    return int(np.argmax(logits / temperature + noise))
    # END SOLUTION


def uniforms(seed: int, position: int, n: int) -> Numbers:
    """The random numbers of tokens 0 to n - 1 in the kernel's noise, float64 [n]."""
    counter = np.zeros((-(-n // 4), 4), np.int64)
    counter[:, 0], counter[:, 1] = np.arange(len(counter)), position
    words = philox(counter, (seed, 0)).reshape(-1)[:n]
    return np.minimum(((words >> np.uint32(8)) + 0.5) * 2.0**-24, 1 - 2.0**-24)


Case = tuple[Numbers, float, Numbers]


def _cases(temperature: float, *, shift: float = 0.0, width: float = 1.0) -> list[Case]:
    """24 draws from 50 logits around `shift`, `width` their standard deviation."""
    logits = np.random.default_rng(3).normal(shift, width, 50).astype(F32).astype(np.float64)
    return [(logits, temperature, uniforms(9, position, 50)) for position in range(24)]


def _drawn(answer: Answer, case: Case) -> Any:
    logits, temperature, u = case
    with np.errstate(all="ignore"):
        given = answer(logits.copy(), temperature, u.copy())
    if given is None:
        raise WrongAnswerError(f"it returns None, {EMPTY}")
    return given


def _equals(given: Any, right: int) -> bool:
    return np.ndim(given) == 0 and bool(given == right)


def _same_tokens(
    temperature: float, *, shift: float = 0.0, width: float = 1.0
) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        cases = _cases(temperature, shift=shift, width=width)
        right = [sample(v.astype(F32), t, 9, position) for position, (v, t, _) in enumerate(cases)]
        given = [_drawn(answer, case) for case in cases]
        if not all(np.array_equal(_drawn(answer, case), given[k]) for k, case in enumerate(cases)):
            raise WrongAnswerError(
                "called again with the same u it gives other tokens: take no random numbers but u"
            )
        wrong = [k for k, one in enumerate(right) if not _equals(given[k], one)]
        if wrong:
            many = f"{len(wrong)} of {len(cases)} draws at temperature {temperature:g} are wrong"
            expect(right[wrong[0]], given[wrong[0]], f"{many}, the first at position {wrong[0]}")

    return trial


def _greedy(answer: Answer) -> None:
    u = uniforms(1, 1, 4)
    for logits in ([1.0, 3.0, 2.0, -1.0], [-3.0, -2.0, -9.0, -2.0], [0.0, 5.0, 5.0, 5.0]):
        right = int(np.argmax(logits))
        where = f"temperature 0, logits {logits}"
        expect(right, _drawn(answer, (np.array(logits), 0.0, u)), where)


def _frequencies(answer: Answer, n: int = 3000) -> None:
    logits, temperature = np.array([1.0, 0.0, 2.0, -1.0, -np.inf]), 0.7
    right = np.exp(logits / temperature)
    right /= right.sum()
    drawn = [_drawn(answer, (logits, temperature, uniforms(4, k, 5))) for k in range(n)]
    for token, p in enumerate(right):
        got = drawn.count(token) / n
        if abs(got - p) > 4.5 * np.sqrt(p * (1 - p) / n):  # standard deviations
            raise WrongAnswerError(
                f"token {token} has probability {p:.1%} at temperature {temperature}, and is drawn "
                f"{got:.1%} of {n:,} times"
            )


def _wrong(value: Callable[[Numbers, float, Numbers], Numbers], *, greedy: bool = True) -> Answer:
    """The argmax of some other value than the right one."""

    def answer(logits: Numbers, temperature: float, u: Numbers) -> int:
        with np.errstate(all="ignore"):
            if temperature == 0 and greedy:
                return int(np.argmax(logits))
            return int(np.argmax(value(logits, temperature, u)))

    return answer


def _gumbel(u: Numbers) -> Numbers:
    return np.asarray(-np.log(-np.log(u)))


def _by_running_sum(logits: Numbers, temperature: float, u: Numbers) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    return int(np.searchsorted(np.cumsum(softmax(logits / temperature)), u[0]))


def _last_of_equal(logits: Numbers, temperature: float, u: Numbers) -> int:
    if temperature == 0:
        return len(logits) - 1 - int(np.argmax(logits[::-1]))
    return int(np.argmax(logits / temperature + _gumbel(u)))


def _value(logits: Numbers, temperature: float, u: Numbers) -> float:
    if temperature == 0:
        return float(np.max(logits))
    return float(np.max(logits / temperature + _gumbel(u)))


_DRAW = PythonExercise(
    id="07.2",
    solution=next_token,
    properties=(
        Property("temperature 0 is the largest logit", _greedy),
        Property("temperature 1 draws what the kernel draws", _same_tokens(1.0)),
        Property("so does temperature 0.5", _same_tokens(0.5)),
        Property("and temperature 3", _same_tokens(3.0)),
        Property("temperature 0.05 is not greedy yet", _same_tokens(0.05, width=0.1)),
        Property("large logits", _same_tokens(0.5, shift=900.0)),
        Property("3,000 draws follow the softmax", _frequencies),
    ),
    mistakes=(
        Mistake(
            _wrong(lambda v, t, u: v),
            "this is greedy at every temperature. Where does u come in?",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t - _gumbel(u)),
            "the noise has the wrong sign. log(u) is negative, so -log(u) is positive, and its "
            "logarithm needs another minus: -log(-log(u)).",
        ),
        Mistake(
            _wrong(lambda v, t, u: (v + _gumbel(u)) / t),
            "the temperature has no effect: it is not used, or it divides logits and noise "
            "together, which changes no order. Only the logits are divided.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v * t + _gumbel(u)),
            "a high temperature must make the logits more alike. Divide by it.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t - np.log(u)),
            "-log(u) is exponential noise. The rule needs one logarithm more.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t + u),
            "u itself is noise of a wrong shape: the winner follows the softmax for Gumbel noise "
            "only.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t + _gumbel(u), greedy=False),
            "temperature 0 divides by 0. It means greedy, and has no noise.",
        ),
        Mistake(
            _by_running_sum,
            "the right distribution with one random number, and a running sum over the whole "
            "vocabulary. The kernel draws other tokens: with noise for each token, and one argmax.",
        ),
        Mistake(
            _wrong(lambda v, t, u: softmax(v / t) + _gumbel(u)),
            "the noise belongs to the logits, not to probabilities; no softmax is needed at all.",
        ),
        Mistake(
            _wrong(lambda v, t, u: softmax(v / t) * u),
            "a probability times u does not follow the softmax, and a sum over all tokens is not "
            "needed: add the noise to logits / temperature.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t + _gumbel(1 - u)),
            "1 - u is as random as u, but the kernel draws other tokens with its u: -log(-log(u)).",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t + np.exp(_gumbel(u))),
            "the noise goes to the logits as it is, -log(-log(u)), without an exponential.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t - np.log2(-np.log(u))),
            "log2 makes the noise 1.44 times as large: it takes natural logarithms.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t - np.log10(-np.log(u))),
            "log10 makes the noise 2.3 times as small: it takes natural logarithms.",
        ),
        Mistake(
            _wrong(lambda v, t, u: np.exp(v / t) / -np.log(u)),
            "the right race, but exp(logits / temperature) overflows for large logits. Its "
            "logarithm does not: logits / temperature - log(-log(u)).",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / t + (_gumbel(u) if t > 0.1 else 0)),
            "only temperature 0 is greedy. A low one still draws, if logits are close.",
        ),
        Mistake(
            _wrong(lambda v, t, u: v / max(t, 1e-6) + _gumbel(u), greedy=False),
            "a tiny temperature instead of 0 still has noise, which decides between equal logits. "
            "Temperature 0 takes the lowest id: treat it on its own.",
        ),
        Mistake(
            _last_of_equal,
            "of equal logits the last one wins at temperature 0. np.argmax takes the first.",
        ),
        Mistake(
            _value,
            "that is the largest value. The id of the token is asked for: argmax instead of max.",
        ),
    ),
    samples=(
        (np.array([-2.0, -1.0, 4.0, 4.5, 4.0]), 0.0, uniforms(2, 0, 5)),
        (np.array([-3.0, -2.0, -9.0, -2.0, -2.0]), 0.0, np.array([0.5, 0.1, 0.9, 0.8, 0.2])),
        (np.array([0.0, 20.0, 0.0]), 1.0, np.array([0.95, 0.1, 0.5])),
        *_cases(1.0),
        *_cases(0.5),
        *_cases(3.0),
        *_cases(0.05, width=0.1),
        *_cases(0.5, shift=900.0),
    ),
    then="Now: the kernel adds the noise in HEAD, on 132 SMs. What do they have to agree upon?",
)

EXERCISES = (_DRAW,)
