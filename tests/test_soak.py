"""The comparison of `bench/soak.py`: what is a near-tie, what explains it, and what is refused."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch

from bench import soak_fast
from bench.agreement import ROUTER_TIE
from bench.soak import Kind, Soak
from bench.soak_compare import TOLERANCE, Nearness, first_difference, nearness, rules_at
from bench.soak_fast import Difference, explain, tie
from bench.soak_router import Exchanging, exchanges
from mkref.engine import Completion
from mkref.engine.sampling import Sampling
from mkref.reference.drawing import Rules, draw
from mkref.reference.model import Reference
from mkref.serve.stream import Event, Usage
from mkref.weights.synthetic import synthetic_weights
from tests.checkpoints import CONFIG

V = 200
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_what_little_changes_make_is_near(temperature: float, filters: dict[str, Any]) -> None:
    """Logits that move by at most d draw no token whose gap is above 2 d."""
    rng, d, others = np.random.default_rng(1), 0.05, 0
    for seed in range(60):
        logits = (2 * rng.normal(size=V)).astype(np.float32)
        rules = Rules(temperature=temperature, seed=seed, bias=((3, 1.5),), **filters)
        own = draw(logits, rules, seed)
        assert 0 == nearness(logits, rules, seed, own).gap
        for _ in range(8):
            moved = (logits + rng.uniform(-d, d, V)).astype(np.float32)
            other = draw(moved, rules, seed)
            if other != own:
                others += 1
                assert 0 < nearness(logits, rules, seed, other).gap <= 2 * d + 1e-5
    assert others


def test_gap_of_greedy_counts_bias_and_penalties() -> None:
    """After them the second is the best, and the other one as far below as they say."""
    logits = np.array([3.0, 2.0, 0.0, -1.0], np.float32)
    sampling = Sampling(presence_penalty=1.5, logit_bias=((2, 1.0),))
    rules, position = rules_at(sampling, (3, 3), (0,), 4)
    assert 2 == position
    assert 1 == draw(logits, rules, position)
    gaps = [nearness(logits, rules, position, token) for token in range(4)]
    assert [(0.5, "greedy"), (0, "greedy"), (1, "greedy"), (3, "greedy")] == gaps


@pytest.mark.parametrize(
    ("filters", "gap"),
    [
        ({"top_k": 2}, 0.25),
        ({"min_p": math.exp(-1.1)}, 0.15),
        ({"top_p": 0.7}, 0.25),
        ({"top_p": 0.82}, 0.047),  # 0.827 of the probability lies above the token
    ],
)
def test_gap_at_an_edge(filters: dict[str, Any], gap: float) -> None:
    """A token that is left out, which noise would take: as far as it is from being kept."""
    logits = np.array([1.25, 0.25, 0.0, -9.0], np.float32)
    found = set()
    for seed in range(400):
        free = Rules(temperature=1, seed=seed)
        if draw(logits, free, 0) == 2:
            near = nearness(logits, Rules(temperature=1, seed=seed, **filters), 0, 2)
            found.add((round(near.gap, 3), near.kind))
    assert {(gap, "filter")} == found


def test_temperature_does_not_hide_a_gap() -> None:
    """It is told in logits: at temperature 10 values are ten times as near as logits are."""
    logits = np.array([5.0, 0.0], np.float32)
    hot = [nearness(logits, Rules(temperature=10, seed=seed), 0, 1).gap for seed in range(200)]
    assert max(hot) > 10 * TOLERANCE
    assert 0 == min(hot)


@pytest.mark.parametrize(
    "rules", [Rules(), Rules(temperature=1.0), Rules(temperature=1, top_p=0.9)]
)
def test_no_numbers_and_banned_tokens_are_never_near(rules: Rules) -> None:
    """NaN passes no comparison; what may not be drawn is infinitely far."""
    for wrong in (math.nan, math.inf):
        logits = np.array([1.0, wrong, 1.0], np.float32)
        assert tie(nearness(logits, rules, 0, 0), None) is None
    banned = Rules(temperature=rules.temperature, top_p=rules.top_p, banned=(1,))
    assert math.inf == nearness(np.ones(3, np.float32), banned, 0, 1).gap


@pytest.mark.parametrize(
    ("gap", "exchanged", "right"),
    [
        (TOLERANCE, None, "drawn"),
        (TOLERANCE + 1e-6, None, None),
        (2.0, TOLERANCE, "router"),
        (2.0, TOLERANCE + 1e-6, None),
        (2.0, math.nan, None),
        (math.nan, None, None),
        (math.nan, 0.0, None),
        (math.inf, None, None),
    ],
)
def test_what_explains_a_place(gap: float, exchanged: float | None, right: str | None) -> None:
    """A small gap, or one that is small after an exchange of experts; NaN is neither."""
    other = None if exchanged is None else Nearness(exchanged, "drawn")
    assert right == tie(Nearness(gap, "drawn"), other)


def test_first_difference() -> None:
    """Of two answers; a beginning differs nowhere."""
    assert 1 == first_difference([5, 6, 7], (5, 0, 7))
    assert first_difference([5, 6], (5, 6, 7)) is None
    assert first_difference([], (5,)) is None


def alone(kind: Kind, logits: list[list[float]]) -> Completion:
    """What it gets alone, greedy, by these logits."""
    tokens = tuple(int(np.argmax(row)) for row in logits)
    rows = np.array(logits, np.float32)
    return Completion(tokens, "text", kind.prompt, "length", "fake", 0.0, rows)


@pytest.mark.parametrize(
    ("token", "shift", "right"),
    [(1, None, "greedy"), (2, None, None), (2, 0.0, None), (2, 3.0, "router"), (2, math.nan, None)],
)
def test_another_token_must_be_explained(
    monkeypatch: pytest.MonkeyPatch, token: int, shift: float | None, right: str | None
) -> None:
    """Near, or brought near by an exchange; any other is beyond tolerance."""

    def exchanged(*args: object) -> list[tuple[dict[int, float], np.ndarray]]:
        return [] if shift is None else [({2: 0.01}, np.array([0, 0, shift, 0], np.float32))]

    monkeypatch.setattr(soak_fast, "exchanges", exchanged)
    kind = Kind((1, 2), 2, Sampling())
    lone = {kind: alone(kind, [[9.0, 0.0, 0.0, 0.0], [3.0, 2.9, 0.5, 0.0]])}
    found = explain([Difference(kind, "stay", True, 1, token)] * 2, lone)
    assert [right, right] == [place["tie"] for place in found["differ"]]
    assert (1, 2 * (right is None)) == (found["distinct_places"], found["beyond_tolerance"])


def test_logits_must_be_those_of_the_answer() -> None:
    """Else a comparison says nothing."""
    kind = Kind((1, 2), 1, Sampling())
    other = alone(kind, [[0.0, 1.0, 0.0, 0.0]])
    other.logits[0] = [1.0, 0.0, 0.0, 0.0]  # type: ignore[index]
    with pytest.raises(AssertionError):
        explain([Difference(kind, "stay", True, 0, 2)], {kind: other})


@pytest.mark.parametrize("fast", [None, cast(Any, object())])
@pytest.mark.parametrize(
    ("tokens", "reason", "right"),
    [
        ([5, 6], "length", "equal"),
        ([5], None, "beginning"),
        ([5, 7], "length", "differs"),
        ([7], "cancelled", "differs"),
        ([5], "length", "wrong"),
        ([5, 7], "error", "wrong"),
        ([5, 6, 6], "length", "wrong"),
        ([5, 6], "stop", "wrong"),
    ],
)
def test_answers_are_compared(fast: Any, tokens: list[int], reason: str | None, right: str) -> None:
    """In exact mode nothing may differ; in fast mode a token may, and nothing else."""
    kind = Kind((1,), 2, Sampling())
    whole = Completion((5, 6), "text", (1,), "length", "fake", 0.0)
    soak = Soak(cast(Any, None), {kind: whole}, 1, 0, fast)
    last = None if reason is None else Event((), "", None, reason, Usage(1, 0, 2))
    soak._compare(kind, "stay", tokens, "text", last)
    record = soak.record
    if fast is None and right == "differs":
        right = "wrong"
    assert int(right == "equal") == record.equal
    assert int(right == "beginning") == record.equal_beginnings
    assert int(right == "differs") == len(record.differ)
    assert int(right == "wrong") == len(record.wrong)
    assert 1 == len(record.differ) + len(record.wrong) + record.equal + record.equal_beginnings


def test_experts_are_exchanged_for_the_last_token_only() -> None:
    """Without an exchange it is the model itself; with one, one expert of one token is another."""
    weights = synthetic_weights(CONFIG, seed=1)
    row = torch.arange(2, 8)[None]
    model = Exchanging(CONFIG, weights)
    plain = model.forward(row)
    assert torch.equal(plain, Reference(CONFIG, weights, numerics="contract").forward(row))
    layer, margin = next(iter(model.margins.items()))
    assert margin >= 0
    model.exchanged = frozenset([layer])
    moved = model.forward(row) - plain
    assert 0 == moved[0, :-1].abs().max() < moved[0, -1].abs().max()


def test_only_near_ties_are_exchanged() -> None:
    """Whatever is offered had a small margin, and moves the logits."""
    weights, offered = synthetic_weights(CONFIG, seed=1), 0
    for first in range(2, 40):
        for layers, shift in exchanges(CONFIG, weights, [first, first + 1]):
            offered += 1
            assert all(0 <= margin <= ROUTER_TIE for margin in layers.values())
            assert np.abs(shift).max() > 0
    assert offered
