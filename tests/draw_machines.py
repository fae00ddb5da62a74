"""A small model on any machine, and launches of it that draw: the sampler in its place."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mkref.machine import create
from mkref.machine.draw import Draw
from mkref.machine.inputs import StepInputs
from mkref.plan.build import build_plan
from tests.decode import small_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mkref.config import NorthConfig
    from mkref.machine.draw import LogProbs
    from mkref.machine.interface import Machine
    from mkref.weights.packed import PackedWeights

__all__ = [
    "POSITIONS", "TOKENS", "VOCAB", "full_settings", "inputs", "loaded", "one_by_one", "ready",
    "stop_ids", "table", "taken",
]  # fmt: skip

MAX_CONTEXT, PAGES = 256, 4
VOCAB = 97
TOKENS, POSITIONS = (5, 40, 77), (0, 0, 0)
TEMPERATURES, SEEDS = (0.0, 1.1, 0.7), (0, 3, 2**63 + 5)
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "prefix_dense_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@cache
def _model(vocab: int) -> tuple[NorthConfig, PackedWeights]:
    return small_model(seed=5, **{**TINY, "vocab_size": vocab})


def loaded(name: str, n_sm: int = 2, vocab: int = VOCAB, rows: int = 8, **options: Any) -> Machine:
    """The tiny model on a machine."""
    config, weights = _model(vocab)
    machine = create(name, **options)
    n = 12 * PAGES
    machine.load(
        build_plan(config, n_sm, full_pages=n, sliding_pages=n, rows=rows), weights, MAX_CONTEXT
    )
    return machine


def table(*rows: int) -> np.ndarray:
    """A page table: sequence `r` has pages 4 r to 4 r + 3."""
    pages = [[r * PAGES + i for i in range(PAGES)] for r in rows]
    return np.asarray([pages, pages], np.int32)


def inputs(
    tokens: Sequence[int] = TOKENS, positions: Sequence[int] = POSITIONS, **changes: Any
) -> StepInputs:
    """Three sequences, one greedy and two with noise."""
    n = len(tokens)
    given: dict[str, Any] = {
        "page_table": table(*range(n)),
        "temperatures": np.asarray(TEMPERATURES[:n], np.float32),
        "seeds": np.asarray(SEEDS[:n], np.uint64),
        **changes,
    }
    return StepInputs(np.asarray(tokens, np.int32), np.asarray(positions, np.int32), **given)


def stop_ids(*ids: int) -> np.ndarray:
    """One stop id per row, in some place; -1 is none."""
    out = np.full((len(ids), 8), -1, np.int32)
    out[range(len(ids)), [row % 8 for row in range(len(ids))]] = ids
    return out


def full_settings() -> Draw:
    """Something of everything for three rows, and log probabilities."""
    draw = Draw.neutral(3)
    draw.top_p[:], draw.top_k[:] = [0.9, 0.8, 0.95], [0, 20, 0]
    draw.min_p[1], draw.presence[:] = 0.02, [0.5, 0, 1]
    draw.frequency[0], draw.repetition[2] = 0.3, 1.3
    draw.bias_ids[2, :2], draw.bias_values[2, :2] = [3, 8], [2, -1]
    draw.logprobs[:] = [-1, 0, 5]
    return draw


def ready(machine: Machine, counted: Sequence[Sequence[int]] = ((), (), ())) -> Machine:
    """Counts of three rows: a prompt of one token, and what they have drawn."""
    for row, (token, drawn) in enumerate(zip(TOKENS, counted, strict=True)):
        machine.set_counts(row, [token], drawn)
    return machine


def taken(launch: Any) -> tuple[list[list[int]], list[LogProbs | None]]:
    """Tokens and log probabilities of a launch, to its end."""
    tokens, told = [], []
    for each in launch:
        tokens.append(each.tolist())
        told.append(launch.logprobs)
    return tokens, told


def one_by_one(
    machine: Machine, n_steps: int, draw: Draw | None, **settings: Any
) -> tuple[list[list[int]], list[LogProbs | None]]:
    """The same steps, each a launch of its own."""
    fed, tokens, told = [*TOKENS], [], []
    for step in range(n_steps):
        given = inputs(fed, [p + step for p in POSITIONS])
        one, its = taken(machine.start(given, draw=draw, **settings))
        fed = one[0]
        tokens += one
        told += its
    return tokens, told
