"""Fast mode in `bench/soak.py`: who went through it, what it does to logits, why tokens differ.

What it does not do: run the service.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.agreement import ROUTER_TIE
from bench.soak_compare import TOLERANCE, Nearness, first_difference, nearness, rules_at
from bench.soak_router import exchanges
from mkref.paths import models_root
from mkref.reference.drawing import Rules, draw
from mkref.reference.routing import Routers, margin
from mkref.weights.checkpoint import load_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from bench.soak import Kind
    from mkref.config import NorthConfig
    from mkref.engine import Completion, Engine
    from mkref.engine.request import Request

CHUNK = PREFILL_FROM = 48
"""Tokens; an engine has 2048 and 128. Small, so that many prompts go in so, in several pieces."""
N_MEASURED, N_TOKENS = 16, 8


class FastPath:
    """Stands between a scheduler and its `Prefill`, and counts.

    Attributes:
        chunk: most tokens at a time.
        n_chunks, n_tokens: that went through it.
    """

    def __init__(self, engine: Engine) -> None:
        inner = engine.scheduler.prefill
        if inner is None:
            raise ValueError("the engine has no fast path")
        self._inner, self._roster = inner, engine.scheduler.roster
        self.chunk = inner.chunk = CHUNK
        self.n_chunks = self.n_tokens = 0
        self._requests: dict[int, Request] = {}  # held, so that no id comes twice
        engine.scheduler.prefill, engine.scheduler.prefill_from = self, PREFILL_FROM

    @property
    def n_requests(self) -> int:
        """Requests of which any token went through it."""
        return len(self._requests)

    def run(self, tokens: Sequence[int], position: int, table: np.ndarray) -> None:
        """As `Prefills.run`."""
        self._inner.run(tokens, position, table)
        self.n_chunks += 1
        self.n_tokens += len(tokens)
        for sequence in self._roster.running:
            if sequence.kv is not None and sequence.kv.table is table:
                self._requests[id(sequence.request)] = sequence.request

    def counts(self) -> dict[str, int]:
        """For the record."""
        return {
            "requests": self.n_requests,
            "chunks": self.n_chunks,
            "tokens": self.n_tokens,
            "chunk": CHUNK,
            "prefill_from": PREFILL_FROM,
        }


@dataclass(frozen=True)
class Difference:
    """An answer that is not the one that its request has alone.

    Attributes:
        kind: the request.
        how: the client stayed, or how it left.
        complete: whether the answer is.
        at: tokens before the first one that differs.
        token: that one.
    """

    kind: Kind
    how: str
    complete: bool
    at: int
    token: int


def noise(engine: Engine, lone: Mapping[Kind, Completion]) -> dict[str, Any]:
    """How far logits of long prompts are from those in exact mode, each request alone.

    Tokens of which a router was nearly tied are counted apart from the others.

    Args:
        engine: in fast mode, keeps nothing.
        lone: answers in exact mode, with logits.
    """
    FastPath(engine)
    apart: dict[bool, list[np.ndarray]] = {True: [], False: []}
    long = [kind for kind in lone if len(kind.prompt) > PREFILL_FROM]
    for kind in long[:N_MEASURED]:
        exact = lone[kind]
        most = min(kind.max_tokens, N_TOKENS)
        fast = engine.generate(**{**kind.settings(), "max_tokens": most}, return_logits=True)
        assert fast.logits is not None
        assert exact.logits is not None
        routers = Routers.of(*_nano(), [*kind.prompt, *exact.token_ids[: most - 1]])
        n = first_difference(fast.token_ids, exact.token_ids)
        same = len(fast.token_ids) if n is None else n + 1  # the logits of that place count
        for at, row in enumerate(fast.logits[:same] - exact.logits[:same]):
            apart[_tied(routers, len(kind.prompt) + at - 1)].append(row)
    return {
        name: {
            "tokens": len(rows),
            "rms": round(float(np.sqrt(np.square(rows).mean())), 4),
            "max": round(float(np.abs(rows).max()), 4),
        }
        for name, rows in (("clear", apart[False]), ("router_tie", apart[True]))
        if rows
    }


def _tied(routers: Routers, token: int) -> bool:
    """Was any layer's router nearly tied?"""
    return any(
        margin(logits[token], routers.k) <= ROUTER_TIE for logits in routers.rounded.values()
    )


def explain(differ: Sequence[Difference], lone: Mapping[Kind, Completion]) -> dict[str, Any]:
    """Every place, with its gap and what explains it; None is beyond tolerance."""
    known: dict[tuple[Kind, int, int], dict[str, Any]] = {}
    places = []
    numbers = {kind: n for n, kind in enumerate(lone)}
    for each in differ:
        key = (each.kind, each.at, each.token)
        if key not in known:
            known[key] = _explain(each, lone[each.kind])
        about = {"kind": numbers[each.kind], "how": each.how, "complete": each.complete}
        places.append({**about, **known[key]})
    return {
        "tolerance": TOLERANCE,
        "router_tie": ROUTER_TIE,
        "differ": places,
        "distinct_places": len(known),
        "beyond_tolerance": sum(place["tie"] is None for place in places),
    }


def _explain(each: Difference, alone: Completion) -> dict[str, Any]:
    kind, at = each.kind, each.at
    before = alone.token_ids[:at]
    assert alone.logits is not None
    logits = alone.logits[at]
    rules, position = rules_at(kind.sampling, kind.prompt, before, len(logits))
    # Else these are not the logits, or not the rules, that the answer was drawn with.
    assert draw(logits, rules, position) == alone.token_ids[at]
    found = _near(logits, rules, position, each.token)
    place = {
        "prompt_tokens": len(kind.prompt),
        "token": at,
        "alone": alone.token_ids[at],
        "fast": each.token,
        "gap": found.gap,
        "decides": found.kind,
        "sampling": {k: v for k, v in asdict(kind.sampling).items() if v},
    }
    if found.gap <= TOLERANCE:
        return {**place, "tie": tie(found, None)}
    nearest, margins = None, {}
    for layers, shift in exchanges(*_nano(), [*kind.prompt, *before]):
        other = _near(logits + shift, rules, position, each.token)
        if nearest is None or other.gap < nearest.gap:
            nearest, margins = other, layers
    if nearest is not None:
        rounded = {layer: round(margin, 4) for layer, margin in margins.items()}
        place |= {"exchanged": rounded, "gap_exchanged": nearest.gap}
    return {**place, "tie": tie(found, nearest)}


def _near(logits: np.ndarray, rules: Rules, position: int, token: int) -> Nearness:
    """As the record tells it, so that it can be judged again from there."""
    found = nearness(logits, rules, position, token)
    return found._replace(gap=round(found.gap, 4))


def tie(found: Nearness, exchanged: Nearness | None) -> str | None:
    """What explains a place: "greedy", "drawn", "filter", "router", or nothing.

    Args:
        found: how near the token was.
        exchanged: the same after the best exchange of nearly tied experts, if there is one.
    """
    if found.gap <= TOLERANCE:
        return found.kind
    # A gap that is not a number is explained by nothing.
    if found.gap > TOLERANCE and exchanged is not None and exchanged.gap <= TOLERANCE:
        return "router"
    return None


@cache
def _nano() -> tuple[NorthConfig, Mapping[str, torch.Tensor]]:
    weights = load_checkpoint(models_root() / "nano")
    return weights.config, weights
