"""Lesson 15: its exercise on claims, the gain that a ladder supports for an idea, and the ladder of
the record with the ideas of each rung."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean, median

import numpy as np

from mkref.lessons.exercise import (
    Answer,
    Mistake,
    Property,
    PythonExercise,
    WrongAnswerError,
    expect,
)
from mkref.lessons.lesson_15 import interval
from mkref.lessons.lesson_15_record import ladder

__all__ = ["EXERCISES", "IDEAS", "claim", "recorded_claims", "recorded_rungs"]

Series = Sequence[float]
Interval = Callable[[Series, Series], tuple[float, float]]
Rungs = Sequence[tuple[frozenset[str], Series]]

_GROUPS = {"per operation": "", "4 per layer": "4 per layer", "3 per layer": "3 per layer"}
IDEAS: dict[str, frozenset[str]] = {
    "launch per operation": frozenset(),
    **{f"graph, {g}": frozenset({"graph", i} - {""}) for g, i in _GROUPS.items()},
    **{f"graph + PDL, {g}": frozenset({"graph", "PDL", i} - {""}) for g, i in _GROUPS.items()},
    **{
        f"graph + PDL, {g}, 2 per SM": frozenset({"graph", "PDL", "room for 2 blocks", i} - {""})
        for g, i in _GROUPS.items()
    },
    "one launch, grid barriers": frozenset({"one launch"}),
    "counters": frozenset({"one launch", "counters"}),
    "balanced order": frozenset({"one launch", "counters", "order"}),
    "loader runs ahead": frozenset({"one launch", "counters", "order", "loader ahead"}),
    "next token on the device": frozenset(
        {"one launch", "counters", "order", "loader ahead", "token on device"}
    ),
}
"""What every rung of the ladder has, by its name: one launch stands for one launch per step, with
barriers where there are no counters."""


def claim(rungs: Rungs, idea: str, interval: Interval) -> float:
    """By how many percent, at least, `idea` makes a step shorter: what the ladder supports.

    `rungs` is a list of (ideas, times): a frozenset of names, and the times of the turns. Two rungs
    tell about an idea if one has it, the other has not, and nothing else differs. If there are
    several such pairs, the claim must hold for all of them. `interval` is that of exercise 15.1.
    The result is 0 where nothing can be claimed.
    """
    # BEGIN SOLUTION
    least = []
    for ideas, before in rungs:
        for others, after in rungs:
            if idea in others and others - {idea} == ideas:  # nothing else differs
                _, high = interval(before, after)
                least.append(100 * (1 - high))
    return max(0.0, min(least, default=0.0))
    # END SOLUTION


# ---- exercise 15.3: what a ladder supports -------------------------------------------------------


def _rungs(*rungs: tuple[str, float], n: int = 12, seed: int = 0) -> Rungs:
    """Rungs by their ideas, one letter each, and their typical time; all in the same turns."""
    rng = np.random.default_rng([n, len(rungs), seed])
    level = 1 + 0.05 * rng.random(n)
    return [
        (
            frozenset(ideas),
            [round(float(x), 5) for x in ms * level * (1 + rng.normal(0, 0.004, n))],
        )
        for ideas, ms in rungs
    ]


_LADDER = _rungs(("", 4.0), ("g", 3.0), ("gp", 2.7), ("k", 3.2), ("kc", 3.195), ("kcol", 2.0))
_TWICE = _rungs(("", 5.0), ("t", 3.0), ("p", 4.5), ("tp", 2.9), ("ptx", 3.1), seed=1)
_SHORT = _rungs(("", 5.0), ("t", 4.0), n=4)
_MIXED = _rungs(("", 5.0), ("t", 4.0), ("p", 4.0), ("tp", 4.2))
_LEAST_FIRST = _rungs(("", 5.0), ("t", 4.6), ("p", 4.5), ("tp", 3.0))
_TURNED = _LADDER[::-1]
_CLAIMS = tuple(
    (ladder, idea, interval)
    for ladder, ideas in (
        (_LADDER, "gpkcol"), (_TWICE, "tpx"), (_SHORT, "t"), (_MIXED, "t"), (_LEAST_FIRST, "tp"),
        (_TURNED, "gp"),
    )
    for idea in ideas
)  # fmt: skip


def _claims(*numbers: int) -> Callable[[Answer], None]:
    def trial(answer: Answer) -> None:
        for case in (_CLAIMS[n] for n in numbers):
            rungs, idea, _ = case
            said = ", ".join(
                f"{{{''.join(sorted(i))}}} {median(times):.2f} ms" for i, times in rungs
            )
            given = answer([(ideas, [*times]) for ideas, times in rungs], idea, interval)
            if isinstance(given, list) or callable(given):
                raise WrongAnswerError(f"idea {idea!r}: it must return a number of percent")
            expect(claim(*case), given, f"idea {idea!r} in {said}", tolerance=1e-9)

    return trial


def _pairs(rungs: Rungs, idea: str) -> list[tuple[Series, Series]]:
    return [
        (before, after)
        for ideas, before in rungs
        for others, after in rungs
        if idea in others and others - {idea} == ideas
    ]


def _gains(rungs: Rungs, idea: str, interval: Interval) -> list[float]:
    """The least gain of each pair, in percent, or less than 0."""
    return [100 * (1 - interval(a, b)[1]) for a, b in _pairs(rungs, idea)]


def _loose(
    rungs: Rungs,
    idea: str,
    interval: Interval,
    fits: Callable[[frozenset[str], frozenset[str]], bool],
) -> float:
    """The least over pairs without and with the idea whose two sets fit together."""
    found = [
        100 * (1 - interval(before, after)[1])
        for ideas, before in rungs
        for others, after in rungs
        if idea in others and idea not in ideas and fits(ideas, others)
    ]
    return max(0.0, min(found, default=0.0))


def _later(rungs: Rungs, idea: str, interval: Interval) -> float:
    """Only pairs whose rung with the idea stands behind the one without."""
    found = [
        100 * (1 - interval(before, after)[1])
        for at, (ideas, before) in enumerate(rungs)
        for others, after in rungs[at + 1 :]
        if idea in others and others - {idea} == ideas
    ]
    return max(0.0, min(found, default=0.0))


def _first_with(rungs: Rungs, idea: str) -> int:
    return next(i for i, (ideas, _) in enumerate(rungs) if idea in ideas)


def _neighbours(rungs: Rungs, idea: str, interval: Interval, *, exact: bool) -> float:
    """Only rungs that follow each other; `exact`: and that differ in nothing else."""
    gains = [
        100 * (1 - interval(before, after)[1])
        for (ideas, before), (others, after) in pairwise(rungs)
        if (others - {idea} == ideas if exact else idea not in ideas) and idea in others
    ]
    return max(0.0, min(gains, default=0.0))


def _percent(ratio: float) -> float:
    return max(0.0, 100 * (1 - ratio))


def _against(rungs: Rungs, idea: str, interval: Interval, back: int | None) -> float:
    """The first rung with the idea, against the one in front of it or against the first of all."""
    at = _first_with(rungs, idea)
    before = rungs[0 if back is None else at - back][1]
    return _percent(interval(before, rungs[at][1])[1])


_CLAIM = PythonExercise(
    id="15.3",
    solution=claim,
    properties=(
        Property("two rungs that differ in one idea", _claims(0, 1)),
        Property("the rung in front is another way", _claims(2)),
        Property("a difference within the noise", _claims(3)),
        Property("two ideas at once", _claims(4, 5)),
        Property("an idea with and without another", _claims(6, 7)),
        Property("an idea that makes it slower", _claims(8)),
        Property("four turns", _claims(9)),
        Property("it gains in one pair and loses in the other", _claims(10)),
        Property("the least pair stands first", _claims(11, 12)),
        Property("the list turned round", _claims(13, 14)),
    ),
    mistakes=(
        Mistake(
            lambda rungs, idea, interval: _against(rungs, idea, interval, 1),
            "the rung in front may differ in more than this idea, or lack what this one has. "
            "Compare the sets.",
        ),
        Mistake(
            lambda rungs, idea, interval: _neighbours(rungs, idea, interval, exact=False),
            "neighbours that differ in the idea may differ in other ideas as well. Ask that "
            "nothing else differs.",
        ),
        Mistake(
            lambda rungs, idea, interval: _neighbours(rungs, idea, interval, exact=True),
            "only neighbours in the list are compared. The partner of a rung may stand anywhere: "
            "look at every pair.",
        ),
        Mistake(
            lambda rungs, idea, interval: _against(rungs, idea, interval, None),
            "against the first rung an idea gets the gains of all that came before it, too.",
        ),
        Mistake(
            lambda rungs, idea, interval: max(
                (_percent(interval(a, b)[1]) for a, b in _pairs(rungs, idea)), default=0.0
            ),
            "the best of several pairs. A claim must hold for all of them: take the least.",
        ),
        Mistake(
            lambda rungs, idea, interval: min(
                (_percent(interval(a, b)[0]) for a, b in _pairs(rungs, idea)), default=0.0
            ),
            "that end of the interval is the most that the idea may bring. Which end is the least?",
        ),
        Mistake(
            lambda rungs, idea, interval: min(
                (_percent(median(b) / median(a)) for a, b in _pairs(rungs, idea)), default=0.0
            ),
            "medians alone: a difference within the noise, or from four turns, is claimed, too.",
        ),
        Mistake(
            lambda rungs, idea, interval: min(
                (100 * (1 - interval(a, b)[1]) for a, b in _pairs(rungs, idea)), default=0.0
            ),
            "less than nothing is no gain: the result is 0 where nothing can be claimed.",
        ),
        Mistake(
            lambda rungs, idea, interval: max(
                0.0,
                min((100 * (1 / interval(a, b)[1] - 1) for a, b in _pairs(rungs, idea)), default=0),
            ),
            "that is how much longer the step was without the idea. How much shorter it became is "
            "a part of the old time.",
        ),
        Mistake(
            lambda rungs, idea, interval: max(
                0.0,
                min((100 * (1 - interval(b, a)[1]) for a, b in _pairs(rungs, idea)), default=0.0),
            ),
            "`interval(a, b)` is of b / a, so the rung without the idea goes first. The other way "
            "round a gain looks like a loss.",
        ),
        Mistake(
            lambda rungs, idea, interval: min(
                (gain for gain in _gains(rungs, idea, interval) if gain > 0), default=0.0
            ),
            "a pair that loses is dropped. With it the claim does not hold for all pairs: 0.",
        ),
        Mistake(
            lambda rungs, idea, interval: max([0.0, *_gains(rungs, idea, interval)[-1:]]),
            "the last of several pairs. A claim must hold for every pair, wherever it stands.",
        ),
        Mistake(
            lambda rungs, idea, interval: max([0.0, *_gains(rungs, idea, interval)[:1]]),
            "the first of several pairs. The next one may gain less, or nothing.",
        ),
        Mistake(
            lambda rungs, idea, interval: max(0.0, mean(_gains(rungs, idea, interval) or [0.0])),
            "the mean of several pairs. It does not hold for the pair that gains less.",
        ),
        Mistake(
            _later,
            "the rung with the idea may stand in front, too: order in the list does not matter.",
        ),
        Mistake(
            lambda rungs, idea, interval: _loose(rungs, idea, interval, frozenset.issubset),
            "one set within the other may still be two ideas smaller. Take the idea out of the "
            "larger one: what is left must equal the smaller one.",
        ),
        Mistake(
            lambda rungs, idea, interval: _loose(
                rungs, idea, interval, lambda ideas, others: others - ideas == {idea}
            ),
            "the rung without the idea may have another one instead, which a difference of sets "
            "does not show. Nothing may differ in either direction.",
        ),
        Mistake(
            lambda rungs, idea, interval: max(
                0.0, min(_gains(rungs, idea, interval), default=0.0) / 100
            ),
            "that is a fraction. Percent are asked for: 5 for a twentieth.",
        ),
    ),
    samples=_CLAIMS,
    then="Now: which rung would you add to the ladder, so that a persistent kernel can be judged?",
)

EXERCISES = (_CLAIM,)


def recorded_rungs(batch: int) -> Rungs:
    """The ladder of the record as `claim` takes it."""
    return [(IDEAS[row.name], row.samples) for row in ladder(batch)]


def recorded_claims(batch: int) -> dict[str, float]:
    """For every idea by how many percent, at least, the record says that it makes a step shorter,
    in the order in which the rungs have them."""
    rungs = recorded_rungs(batch)
    ideas: dict[str, None] = {}
    for have, _ in rungs:
        ideas.update(dict.fromkeys(sorted(have)))
    return {idea: claim(rungs, idea, interval) for idea in ideas}
