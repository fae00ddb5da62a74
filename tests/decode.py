"""Drive a machine step by step, without the engine: fixed pages, prompts fed token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mkref.config import NorthConfig
from mkref.machine.base import Machine, StepInputs
from mkref.plan.build import PAGE, Plan, build_plan
from mkref.weights.synthetic import synthetic_weights

if TYPE_CHECKING:
    from mkref.weights.packed import PackedWeights

__all__ = ["SMALL", "Run", "drive", "drive_from", "drive_launches", "small_config", "small_model"]

SMALL = {
    "vocab_size": 517,
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 48,
    "prefix_dense_intermediate_size": 112,
    "first_k_dense_replace": 1,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "expert_selection_fn": "sigmoid",
    "sliding_window": 70,
    "sliding_window_pattern": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "logit_scale": 1.0,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Every branch of the model, widths that are no powers of two, a vocabulary with a padded last row
block.
"""


def small_config(**changes: object) -> NorthConfig:
    """`SMALL` with some fields changed."""
    return NorthConfig.from_dict({**SMALL, **changes})


def small_model(seed: int = 3, **changes: object) -> tuple[NorthConfig, PackedWeights]:
    """A small config and synthetic weights for it, equal on every machine."""
    config = small_config(**changes)
    return config, synthetic_weights(config, seed=seed)


@dataclass(frozen=True)
class Run:
    """Logits float32 [steps, rows, V] and the tokens that were sampled, int32 [steps, rows]."""

    logits: np.ndarray
    tokens: np.ndarray

    def bits(self, row: int) -> bytes:
        """All logits of one row."""
        return self.logits[:, row].tobytes()


def drive(
    machine: Machine,
    weights: PackedWeights,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    n_sm: int,
    temperatures: Sequence[float] = (),
    seeds: Sequence[int] = (),
    max_context: int = 512,
    page_seed: int = 0,
    starts: Sequence[int] = (),
) -> Run:
    """Load the model and run `steps` steps; row `r` feeds its prompt, then its own samples.

    `page_seed` shuffles the pages of the pool; `starts` gives rows a first position other than 0
    (their earlier keys then are what the pool was poisoned with, so only for runs that write the
    pool themselves).
    """
    table = _load(machine, weights, len(prompts), n_sm, max_context, page_seed)
    n = len(prompts)
    fed = [prompt[0] for prompt in prompts]
    first = np.asarray(list(starts) or [0] * n)
    logits, tokens = [], []
    for step in range(steps):
        sampled = machine.step(
            StepInputs(
                np.asarray(fed, np.int32),
                (first + step).astype(np.int32),
                table,
                np.asarray(temperatures, np.float32),
                np.asarray(seeds, np.uint64),
            )
        )
        logits.append(machine.logits(n))
        tokens.append(sampled)
        fed = [p[step + 1] if step + 1 < len(p) else int(sampled[r]) for r, p in enumerate(prompts)]
    return Run(np.stack(logits), np.stack(tokens))


def _load(
    machine: Machine,
    weights: PackedWeights,
    n: int,
    n_sm: int,
    max_context: int,
    page_seed: int,
) -> np.ndarray:
    """Load a plan with room for `n` sequences; a page table that shuffles their pages."""
    pages = max_context // PAGE
    plan: Plan = build_plan(
        weights.config, n_sm, full_pages=n * pages + 3, sliding_pages=n * pages + 5
    )
    machine.load(plan, weights, max_context)
    rng = np.random.default_rng(page_seed)
    table = [
        rng.permutation(n * pages + 3 + 2 * kind)[: n * pages].reshape(n, pages) for kind in (0, 1)
    ]
    return np.stack(table).astype(np.int32)


def drive_launches(
    machine: Machine,
    weights: PackedWeights,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    n_sm: int,
    temperatures: Sequence[float] = (),
    seeds: Sequence[int] = (),
    max_context: int = 512,
) -> tuple[np.ndarray, np.ndarray]:
    """Like `drive` for prompts of one token, in launches of 1, 13, 25, 37, 1, ... steps.

    Returns:
        Tokens int32 [steps, rows], and the logits of the last step, float32 [rows, V].
    """
    n = len(prompts)
    table = _load(machine, weights, n, n_sm, max_context, 0)
    tokens = [np.asarray([[prompt[0] for prompt in prompts]], np.int32)]
    fed = 0
    while fed < steps:
        inputs = StepInputs(
            tokens[-1][-1],
            np.full(n, fed, np.int32),
            table,
            np.asarray(temperatures, np.float32),
            np.asarray(seeds, np.uint64),
        )
        n_steps = min(1 + 12 * ((len(tokens) - 1) % 4), steps - fed)
        tokens.append(machine.decode(inputs, n_steps))
        fed += n_steps
    return np.concatenate(tokens[1:]), machine.logits(n)


def drive_from(machine: Machine, weights: PackedWeights, first_step: int, n_sm: int) -> bytes:
    """Logits of six greedy steps by a machine that pretends to have run `first_step` before them.

    Its counters stand where they would then stand, modulo 2^32, as the hardware adds.
    """
    plan = build_plan(weights.config, n_sm, full_pages=4, sliding_pages=4)
    machine.load(plan, weights, 4 * PAGE)
    counters = machine.read("counters").view(np.uint32)
    counters[:, :2] = [[c.target * first_step % 2**32] * 2 for c in plan.counters]
    machine.write("counters", counters.view(np.int32))
    machine.steps = first_step  # type: ignore[attr-defined]
    table = np.arange(4, dtype=np.int32).reshape(1, 1, 4).repeat(2, axis=0)
    token, logits = 5, []
    for position in range(6):
        at = np.asarray([position], np.int32)
        token = int(machine.step(StepInputs(np.asarray([token], np.int32), at, table))[0])
        logits.append(machine.logits(1).tobytes())
    return b"".join(logits)
