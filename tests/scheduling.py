"""Sequences in an engine on the fake machine, run to their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.engine.sequence import Sequence
from tests.fakes import VOCAB, fake_engine

if TYPE_CHECKING:
    from mkref.engine import Engine


def line_up(engine: Engine, prompt: Any, max_tokens: int = 20, **settings: Any) -> Sequence:
    """A sequence that waits in an engine's scheduler; nothing but its length ends it."""
    request = engine.request(prompt, max_tokens, ignore_eos=True, **settings)
    sequence = Sequence(request, engine.tokenizer)
    engine.scheduler.submit(sequence)
    return sequence


def run(engine: Engine, *sequences: Sequence, most: int = 20_000) -> None:
    """Steps until those have ended, or everybody."""
    for _ in range(most):
        if all(s.finish_reason or s.error for s in sequences) if sequences else False:
            return
        if not engine.scheduler.busy:
            return
        engine.scheduler.step()
    raise AssertionError(f"not done after {most} steps")


def alone(prompt: Any, max_tokens: int = 20, **settings: Any) -> list[int]:
    """The tokens on an engine that has nothing else to do and keeps nothing."""
    engine, _ = fake_engine(reuse=False)
    sequence = line_up(engine, prompt, max_tokens, **settings)
    run(engine)
    return sequence.generated.tolist()


def all_back(engine: Engine) -> None:
    """Nobody holds a page."""
    engine.kv.check()
    assert engine.kv.budget == (engine.kv.available(0), engine.kv.available(1))


def ids(n: int, seed: int = 0) -> list[int]:
    """A prompt like no other."""
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()
