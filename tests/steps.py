"""Requests with a history, and interpreters that feed them. No tests here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mkref.plan import Interpreter, Plan, build_plan
from mkref.reference.scalars import to_bf16
from mkref.weights.layout import kv_tile, pack_kv_page
from tests.decode import small_model

if TYPE_CHECKING:
    from mkref.plan.memory import Buffers
    from mkref.weights.packed import PackedWeights

__all__ = ["REQUESTS", "Outcome", "Request", "feed", "fresh", "model", "plan_for", "some_steps"]
__all__ += ["two_steps"]

MAX_CONTEXT = 384
PAGES = 6
Words = npt.NDArray[np.uint16]


def model(weight_seed: int = 3, /, **changes: object) -> PackedWeights:
    """The small model, or one like it."""
    return small_model(weight_seed, **changes)[1]


@dataclass(frozen=True)
class Request:
    """A sequence about to feed the token at `position`; its history follows from `name`."""

    name: int
    token: int
    position: int
    temperature: float = 0.0
    seed: int = 0

    def history(self, weights: PackedWeights, layer: int) -> Words:
        """Keys and values of all earlier tokens: uint16 [2, KV heads, 64 PAGES, D], then NaN."""
        c = weights.config
        rng = np.random.default_rng([self.name, layer])
        shape = (2, c.num_key_value_heads, PAGES * 64, c.head_dim)
        values = rng.standard_normal(shape).astype(np.float32)
        values[:, :, self.position :] = np.nan
        return to_bf16(values)


REQUESTS = [
    Request(0, 5, 0),
    Request(1, 77, 63, 1.0, 1),
    Request(2, 300, 64),
    Request(3, 12, 130, 0.7, 2**63 + 11),
    Request(4, 516, 300),
    Request(5, 9, 127, 2.0, 5),
]


@dataclass(frozen=True)
class Outcome:
    """Of some steps, per request: tokens, and the bits of all logits."""

    tokens: list[tuple[int, ...]]
    bits: list[bytes]


def plan_for(weights: PackedWeights, n_sm: int, rows: int = 8) -> Plan:
    """A plan with room for that many requests."""
    pages = rows * PAGES
    return build_plan(weights.config, n_sm, full_pages=pages, sliding_pages=pages, rows=rows)


def write_history(
    buffers: Buffers, weights: PackedWeights, requests: Sequence[Request], plan: Plan, seed: int
) -> None:
    """Put the histories into shuffled pages; everything else in the pool stays poison."""
    n, c = len(requests), weights.config
    rng, pool = np.random.default_rng(seed), plan.rows * PAGES
    table = np.stack([rng.permutation(pool)[: n * PAGES].reshape(n, PAGES) for _ in range(2)])
    buffers["page_table"][:, :n] = table
    for layer in range(c.num_hidden_layers):
        base, pages = plan.pool.base(c, layer), table[int(c.is_sliding(layer))]
        for row, request in enumerate(requests):
            keys, values = request.history(weights, layer)
            for page in range(PAGES):
                for head in range(c.num_key_value_heads):
                    at = kv_tile(base, int(pages[row, page]), head, c)
                    part = (head, slice(page * 64, page * 64 + 64))
                    tiles = pack_kv_page(keys[part], values[part])
                    buffers["kv"][at : at + len(tiles)] = tiles


def feed(
    weights: PackedWeights,
    requests: Sequence[Request],
    plan: Plan,
    *,
    order: int | None = None,
    page_seed: int = 0,
) -> Interpreter:
    """An interpreter that is about to feed each request's token."""
    interpreter = Interpreter.of(plan, MAX_CONTEXT, order=order)
    n, b = len(requests), interpreter.buffers
    b["weights"][...], b["gammas"][...] = weights.words()
    write_history(b, weights, requests, plan, page_seed)
    b["tokens"][:n] = [r.token for r in requests]
    b["positions"][:n] = [r.position for r in requests]
    b["earlier"][:n] = 0
    b["temperatures"][:n] = [r.temperature for r in requests]
    seeds = np.array([r.seed for r in requests], dtype=np.uint64)
    b["seeds"][:n] = seeds.view(np.uint32).reshape(n, 2)
    return interpreter


def some_steps(interpreter: Interpreter, n: int, steps: int, *, one_launch: bool) -> Outcome:
    """Feed `n` rows, then what was sampled: a launch for each step, or one for all."""
    b, sampled, logits = interpreter.buffers, [], []
    for step in range(steps):
        at = step if one_launch else 0
        interpreter.run(n, step, at)
        tokens = b["tokens_out"][at, :n].copy()
        if not one_launch:
            b["tokens"][:n] = tokens
            b["positions"][:n] += 1
        sampled.append(tokens.tolist())
        logits.append(b["logits"][:n].copy())
    bits = [b"".join(part[row].tobytes() for part in logits) for row in range(n)]
    return Outcome(list(zip(*sampled, strict=True)), bits)


def two_steps(
    weights: PackedWeights,
    requests: Sequence[Request],
    plan: Plan,
    *,
    order: int | None = None,
    page_seed: int = 0,
    one_launch: bool = False,
) -> Outcome:
    """Feed each request's token and then the one that was sampled."""
    interpreter = feed(weights, requests, plan, order=order, page_seed=page_seed)
    return some_steps(interpreter, len(requests), 2, one_launch=one_launch)


def fresh(plan: Plan, weights: PackedWeights, *, order: int | None = None) -> Interpreter:
    """An interpreter with weights and one request at position 0."""
    interpreter = Interpreter.of(plan, 64, order=order)
    interpreter.buffers["weights"][...], interpreter.buffers["gammas"][...] = weights.words()
    for name in ("tokens", "positions", "earlier", "page_table", "temperatures", "seeds"):
        interpreter.buffers[name][...] = 0
    return interpreter
