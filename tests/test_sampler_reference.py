"""The oracle of the sampler against definitions in float64, and what it draws against chance."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from mkref.reference.drawing import IN_PROMPT, Rules, adjusted, count, counted, draw, kept, logprobs
from mkref.reference.sampling import sample
from tests.draws import likely

VOCAB = 60


def softmax(values: np.ndarray) -> np.ndarray:
    """Probabilities in float64."""
    weights = np.exp(values.astype(np.float64) - float(values.max()))
    return np.asarray(weights / weights.sum())


def by_definition(values: np.ndarray, rules: Rules) -> set[int]:
    """What filters keep, in plain words: sort, count, add up, compare."""
    order = np.argsort(-values, kind="stable")
    if rules.top_k:
        order = order[values[order] >= values[order[min(rules.top_k, len(order)) - 1]]]
    if rules.top_p < 1:
        shares = softmax(values[order])
        last = int(np.argmax(np.cumsum(shares) >= rules.top_p - 1e-9))
        order = order[values[order] >= values[order[last]]]
    if rules.min_p:
        p = softmax(values)
        order = order[p[order] >= rules.min_p * p.max() * (1 - 1e-6)]
    return {*order.tolist()}


@pytest.mark.parametrize("top_k", [0, 1, 4, 25, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.7, 0.05])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_filters_are_what_they_say(top_k: int, top_p: float, min_p: float) -> None:
    """The same tokens stay as by the definitions in float64."""
    rules = Rules(temperature=1, top_k=top_k, top_p=top_p, min_p=min_p)
    for seed in range(6):
        values = likely(1, 300, seed)[0]
        assert by_definition(values, rules) == {*np.flatnonzero(kept(values, rules)).tolist()}


def chi_square(logits: np.ndarray, rules: Rules, n: int) -> tuple[float, int]:
    """Of n draws at positions of their own: the statistic, and its degrees of freedom."""
    z = adjusted(logits, rules) / np.float32(rules.temperature)
    keep = kept(z, rules)
    p = np.where(keep, softmax(np.where(keep, z, -np.inf)), 0)
    drawn = Counter(draw(logits, rules, position) for position in range(n))
    assert {*drawn} <= {*np.flatnonzero(keep).tolist()}
    often = np.flatnonzero(p * n >= 5)  # the rest is one class
    classes = [(p[t] * n, drawn[int(t)]) for t in often]
    rest = n - sum(expected for expected, _ in classes)
    if rest > 1:
        classes.append((rest, n - sum(seen for _, seen in classes)))
    return sum((seen - expected) ** 2 / expected for expected, seen in classes), len(classes) - 1


@pytest.mark.parametrize(
    "rules",
    [
        Rules(temperature=1, seed=11),
        Rules(temperature=2.5, seed=12),
        Rules(temperature=1, seed=13, top_p=0.8),
        Rules(temperature=1.5, seed=14, top_k=6),
        Rules(temperature=2, seed=15, min_p=0.05),
        Rules(temperature=2, seed=16, top_k=12, top_p=0.9, min_p=0.02),
        Rules(temperature=2, seed=17, bias=((3, 4.0), (9, -2.0)), banned=(5,)),
    ],
    ids=["plain", "hot", "top_p", "top_k", "min_p", "all", "bias"],
)
def test_tokens_come_as_often_as_they_should(rules: Rules) -> None:
    """Chi-square of 4000 draws; its mean is the degrees of freedom, four deviations are allowed."""
    logits = np.random.default_rng(1).normal(0, 1.8, VOCAB).astype(np.float32)
    found, freedom = chi_square(logits, rules, 4000)
    print(f"chi-square {found:.1f} with {freedom} degrees of freedom")
    assert freedom >= 3
    assert abs(found - freedom) < 4 * math.sqrt(2 * freedom)


def test_chi_square_sees_a_wrong_temperature() -> None:
    """The test above has teeth: noise for temperature 1 on probabilities of 1.3 is found out."""
    logits = np.random.default_rng(1).normal(0, 1.8, VOCAB).astype(np.float32)
    n = 4000
    p = softmax(logits / np.float32(1.3))
    drawn = Counter(draw(logits, Rules(temperature=1, seed=11), position) for position in range(n))
    found = sum((drawn[t] - p[t] * n) ** 2 / (p[t] * n) for t in range(VOCAB))
    assert found > VOCAB + 8 * math.sqrt(2 * VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0, 3.0])
def test_temperature_alone_is_the_kernels_draw(temperature: float) -> None:
    """With neutral settings the token is that of `mkref.reference.sampling.sample`."""
    for position in range(40):
        logits = likely(1, 300, position)[0]
        rules = Rules(temperature=temperature, seed=9, counts=np.ones(300, np.uint16))
        assert sample(logits, temperature, 9, position) == draw(logits, rules, position)


def test_penalties_by_hand() -> None:
    """Repetition, then frequency, then presence, each after the bias; numbers that are exact."""
    logits = np.asarray([4, -4, 4, -4, 4, 1], np.float32)
    counts = counted([0, 1, 2], [2, 2, 3, 2, 4], 6)
    assert [IN_PROMPT, IN_PROMPT, IN_PROMPT + 3, 1, 1, 0] == counts.tolist()
    rules = Rules(
        repetition=2, frequency=0.25, presence=0.5, counts=counts, bias=((4, 2.0), (5, -3.0))
    )
    # 4 / 2; -4 * 2; 4 / 2 - 0.75 - 0.5; -4 * 2 - 0.25 - 0.5; (4 + 2) / 2 - 0.25 - 0.5; 1 - 3
    assert [2, -8, 0.75, -8.75, 2.25, -2] == adjusted(logits, rules).tolist()
    assert logits.tolist() == [4, -4, 4, -4, 4, 1]


def test_banned_tokens_never_come() -> None:
    """Not with noise, not greedily; unused places of a list of ids ban nothing."""
    logits = np.asarray([9, 8, 7, 1, 1], np.float32)
    allowed = np.asarray([0b11011], np.uint32)
    rules = {"banned": (0, -1, 77), "allowed": allowed}
    assert 1 == draw(logits, Rules(**rules), 0)  # type: ignore[arg-type]
    hot = Rules(temperature=50, seed=1, **rules)  # type: ignore[arg-type]
    assert {1, 3, 4} == {draw(logits, hot, position) for position in range(60)}


def test_counts_stop_at_their_largest() -> None:
    """A count has 15 bits; the one for the prompt stays as it is."""
    counts = np.asarray([0, 0x7FFE, 0x7FFF, IN_PROMPT, 0xFFFF], np.uint16)
    for token in range(5):
        count(counts, token)
    assert [1, 0x7FFF, 0x7FFF, IN_PROMPT + 1, 0xFFFF] == counts.tolist()
    assert 0x7FFF == counted([], [1] * 40000, 3)[1]


def test_logprobs_are_log_softmax() -> None:
    """Within float32's reach of float64, the most likely first, of equal ones the lower id."""
    logits = likely(1, 5000, 3)[0]
    logits[[17, 40]] = logits.max() + 1
    expected = np.log(softmax(logits))
    value, ids, values = logprobs(logits, 123, 20)
    assert abs(expected[123] - float(value)) < 1e-5
    assert [17, 40] == ids[:2].tolist()
    assert np.argsort(-logits, kind="stable")[:20].tolist() == ids.tolist()
    assert np.abs(expected[ids] - values).max() < 1e-5
    assert float(np.exp(values.astype(np.float64)).sum()) < 1


def test_huge_logits_stay_finite() -> None:
    """A division by a tiny temperature overflows; the larger ones still win."""
    logits = np.asarray([1e38, 3e38, -3e38, 0], np.float32)
    for rules in (Rules(temperature=1e-3, top_p=0.5), Rules(temperature=1e-3, top_k=2, min_p=0.5)):
        assert {draw(logits, rules, position) for position in range(5)} <= {0, 1}
