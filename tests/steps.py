"""Requests with a history, and interpreters that feed them. No tests here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mkref.machine.base import StepInputs
from mkref.machine.interpreter import InterpreterMachine
from mkref.plan import Interpreter, Plan, build_plan
from mkref.reference.scalars import to_bf16
from mkref.weights.layout import kv_tile, pack_kv_page
from tests.decode import small_model

__all__ = ["REQUESTS", "Outcome", "Request", "fresh", "model", "plan_for", "two_steps"]

if TYPE_CHECKING:
    from mkref.weights.packed import PackedWeights

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
    """Of two steps, per request: tokens, and the bits of all logits."""

    tokens: list[tuple[int, ...]]
    bits: list[bytes]


def load(
    machine: InterpreterMachine,
    weights: PackedWeights,
    requests: Sequence[Request],
    plan: Plan,
    page_seed: int = 0,
) -> npt.NDArray[np.int32]:
    """Load a plan, put the histories into shuffled pages, poison the rest; the page table."""
    machine.load(plan, weights, MAX_CONTEXT)
    n, c = len(requests), weights.config
    rng = np.random.default_rng(page_seed)
    table = np.stack([rng.permutation(8 * PAGES)[: n * PAGES].reshape(n, PAGES) for _ in range(2)])
    kv = machine.read("kv")
    for layer in range(c.num_hidden_layers):
        base, pages = plan.pool.base(c, layer), table[int(c.is_sliding(layer))]
        for row, request in enumerate(requests):
            keys, values = request.history(weights, layer)
            for page in range(PAGES):
                for head in range(c.num_key_value_heads):
                    at = kv_tile(base, int(pages[row, page]), head, c)
                    part = (head, slice(page * 64, page * 64 + 64))
                    tiles = pack_kv_page(keys[part], values[part])
                    kv[at : at + len(tiles)] = tiles
    machine.write("kv", kv)
    return table.astype(np.int32)


def plan_for(weights: PackedWeights, n_sm: int) -> Plan:
    """A plan with room for eight requests."""
    return build_plan(weights.config, n_sm, full_pages=8 * PAGES, sliding_pages=8 * PAGES)


def two_steps(
    weights: PackedWeights,
    requests: Sequence[Request],
    plan: Plan,
    *,
    order: int | None = None,
    page_seed: int = 0,
) -> Outcome:
    """Feed each request's token and then the one that was sampled."""
    machine = InterpreterMachine(order=order)
    table = load(machine, weights, requests, plan, page_seed)
    n = len(requests)
    tokens = np.array([r.token for r in requests], dtype=np.int32)
    positions = np.array([r.position for r in requests], dtype=np.int32)
    temperatures = np.array([r.temperature for r in requests], dtype=np.float32)
    seeds = np.array([r.seed for r in requests], dtype=np.uint64)
    sampled, logits = [], []
    for step in range(2):
        inputs = StepInputs(tokens, positions + step, table, temperatures, seeds)
        tokens = machine.step(inputs)
        sampled.append(tokens.tolist())
        logits.append(machine.logits(n))
    bits = [b"".join(part[row].tobytes() for part in logits) for row in range(n)]
    return Outcome(list(zip(*sampled, strict=True)), bits)


def fresh(plan: Plan, weights: PackedWeights, *, order: int | None = None) -> Interpreter:
    """An interpreter with weights and one request at position 0."""
    interpreter = Interpreter.of(plan, 64, order=order)
    interpreter.buffers["weights"][...], interpreter.buffers["gammas"][...] = weights.words()
    for name in ("tokens", "positions", "page_table", "temperatures", "seeds"):
        interpreter.buffers[name][...] = 0
    return interpreter
