"""The scheduler under random load: nobody can tell from an answer what else went on."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mkref.engine.sampling import Sampling
from mkref.engine.sequence import Sequence
from mkref.errors import MachineError
from tests.fakes import VOCAB, FakeMachine, FakePrefill, fake_engine

if TYPE_CHECKING:
    from mkref.engine import Engine
    from mkref.engine.request import Request

LONE: dict[tuple[Any, ...], tuple[list[int], str | None]] = {}


class Multiples:
    """A constraint: multiples of `n` only, and an end after a zero modulo 7 n."""

    def __init__(self, n: int) -> None:
        self.n, self.ended = n, False

    def mask(self) -> np.ndarray:
        """Every n-th bit."""
        return _multiples(self.n)

    def accept(self, token: int) -> None:
        """Must be one that was allowed."""
        assert token % self.n == 0
        assert not self.ended
        self.ended = token % (7 * self.n) == 0


@cache
def _multiples(n: int) -> np.ndarray:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in range(0, VOCAB, n):
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def random_request(rng: random.Random, stems: list[list[int]], longest: int) -> dict[str, Any]:
    """Settings of a request; prompts often begin alike."""
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(0, len(stem))] if rng.random() < 0.7 else []
    prompt = [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 90)))][: longest // 2]
    settings: dict[str, Any] = {}
    if rng.random() < 0.5:
        settings["temperature"] = rng.choice([0.5, 1.0])
        settings["seed"] = rng.randrange(4)
    if rng.random() < 0.3:
        settings |= rng.choice(
            [
                {"top_p": 0.9},
                {"top_k": 5},
                {"presence_penalty": 0.5},
                {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
                {"logit_bias": ((7, 2.0), (9, -1.0))},
                {"logprobs": 3},
                {"min_tokens": 4},
            ]
        )
    most = rng.randint(4, rng.choice([20, 120, 400]))
    return {
        "prompt": tuple(prompt),
        "max_tokens": min(most, longest - len(prompt)),
        "sampling": Sampling(**_allowed(settings, longest - len(prompt))),
        "stop": tuple(rng.sample(range(VOCAB), 3)) if rng.random() < 0.4 else None,
        "constraint": rng.choice([2, 5]) if rng.random() < 0.08 else None,
        "priority": rng.choice([0, 0, 0, -2, 3]),
    }


def _allowed(settings: dict[str, Any], room: int) -> dict[str, Any]:
    return {**settings, "min_tokens": min(settings.get("min_tokens", 0), room)}


def made(engine: Engine, wish: dict[str, Any], deadline: float | None = None) -> Request:
    """The request of a wish."""
    n = wish["constraint"]
    return engine.request(
        **{**wish, "constraint": None if n is None else Multiples(n)}, deadline=deadline
    )


def lone(wish: dict[str, Any], window: int) -> tuple[list[int], str | None]:
    """Tokens and reason that a wish gets alone, on an engine that keeps nothing."""
    key = (window, *wish.values())
    if key not in LONE:
        engine, _ = _lone_engine(window)
        sequence = Sequence(made(engine, wish), None)
        engine.scheduler.submit(sequence)
        while sequence.finish_reason is None:
            engine.scheduler.step()
        LONE[key] = (sequence.generated.tolist(), sequence.finish_reason)
    return LONE[key]


@cache
def _lone_engine(window: int) -> tuple[Engine, FakeMachine]:
    return fake_engine(reuse=False, window=window, debug=False)


@pytest.mark.parametrize("seed", range(10))
def test_random_load(seed: int) -> None:
    """Arrivals, cancellations, deadlines, failures, short pools: whoever gets done has its own
    answer, every page is accounted for after every operation, and nobody waits for ever.
    """
    rng = random.Random(seed)
    longest = rng.choice([256, 512])
    window = rng.choice([70, 100])
    sizes: dict[str, Any] = {
        "rows": rng.choice([2, 8, 16]),
        "full_pages": longest // 64 + rng.choice([0, 0, 2, 8, 40]),
        "sliding_pages": 5 + rng.choice([0, 3, 20]),
        "window": window,
        "lag": rng.randint(0, 3),
        "max_context": longest,
    }
    engine, machine = fake_engine(reuse=rng.random() < 0.8, **sizes)
    scheduler, kv = engine.scheduler, engine.kv
    if rng.random() < 0.4:
        scheduler.prefill = FakePrefill(machine, chunk=rng.choice([48, 200]))
        scheduler.prefill_from = rng.choice([1, 32])
    if rng.random() < 0.4:  # admit without a look at the pages: much has to be taken back
        scheduler.roster._has_room = lambda newcomer: True  # type: ignore[method-assign]
    stems = [[rng.randrange(VOCAB) for _ in range(200)] for _ in range(3)]
    live: list[tuple[dict[str, Any], Sequence]] = []
    n_submitted = n_whole = n_steps = 0
    while n_submitted < 100 or live:
        if n_submitted < 100 and (rng.random() < 0.2 or not live):
            for _ in range(rng.choice([1, 1, 1, 6])):
                wish = random_request(rng, stems, longest)
                deadline = 0.0 if rng.random() < 0.03 else None
                sequence = Sequence(made(engine, wish, deadline), None)
                scheduler.submit(sequence)
                live.append((wish, sequence))
                n_submitted += 1
        if rng.random() < 0.004:
            scheduler.cancel(rng.choice(live)[1])
        if rng.random() < 0.0005:
            machine.fail_at = machine.steps + rng.randint(1, 20)
        if scheduler.busy:
            try:
                scheduler.step()
            except MachineError:
                kv.check()
                assert [] == scheduler.roster.running
        n_steps += 1
        assert n_steps < 100_000
        for wish, sequence in live:
            tokens = sequence.generated.tolist()
            if sequence.error is not None:
                assert isinstance(sequence.error, MachineError)
            elif sequence.finish_reason in ("length", "stop", "eos"):
                assert lone(wish, window) == (tokens, sequence.finish_reason)
                n_whole += 1
            elif sequence.finish_reason:
                assert sequence.finish_reason in ("cancelled", "deadline")
                assert lone(wish, window)[0][: len(tokens)] == tokens
        live = [(w, s) for w, s in live if s.finish_reason is None and s.error is None]
    assert n_whole > 30
    assert not scheduler.busy
    kv.check()
    assert kv.budget == (kv.available(0), kv.available(1))
    assert {} == scheduler.roster._refused
