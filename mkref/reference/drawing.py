"""Drawing a token with every setting of a request, bit for bit as `cuda/sampler/` does it.

In this order: bias, penalties, bans, temperature, top_k, top_p, min_p, noise, largest. Values are
float32 with one rounding per operation. Probabilities are whole numbers: the weight
`exp(z - max z)`, in units of 2^-40 and rounded down, so that a sum does not depend on its order.
Equal values are kept or left out together.

What it does not do: greedy and temperature without more, which are `mkref.reference.sampling`'s;
this gives the same tokens there.

Notation: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mkref.reference.sampling import gumbel, order_key
from mkref.reference.scalars import F32, Float, exp, log

__all__ = [
    "IN_PROMPT",
    "Rules",
    "adjusted",
    "count",
    "counted",
    "draw",
    "kept",
    "logprobs",
    "masses",
]

Counts = npt.NDArray[np.uint16]
Masses = npt.NDArray[np.uint64]

UNIT = F32(2.0**40)
LARGEST = np.finfo(np.float32).max
IN_PROMPT, MOST = 0x8000, 0x7FFF
"""A count has 15 bits for the answer, and one that says whether the prompt has the token."""


@dataclass(frozen=True)
class Rules:
    """Settings of one draw; the defaults are off.

    Attributes:
        temperature: 0 is greedy.
        seed: of the noise.
        top_k, top_p, min_p, presence, frequency, repetition: as in `mkref.engine.sampling`.
        bias: token ids, each once, and what is added to their logits.
        banned: token ids that are not drawn.
        allowed: uint32 [ceil(V / 32)], a bit per token that may be drawn; None for all.
        counts: uint16 [V], see `counted`; None without penalties.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    allowed: npt.NDArray[np.uint32] | None = None
    counts: Counts | None = None


def counted(prompt: npt.ArrayLike, output: npt.ArrayLike, vocab_size: int) -> Counts:
    """Counts of the tokens of an answer, with a bit for those of its prompt: uint16 [V]."""
    tokens = np.asarray(output, np.int64)
    counts = np.minimum(np.bincount(tokens, minlength=vocab_size), MOST).astype(np.uint16)
    counts[np.asarray(prompt, np.int64)] |= IN_PROMPT
    return counts


def count(counts: Counts, token: int) -> None:
    """Count one more token of the answer, in place."""
    if counts[token] & MOST < MOST:
        counts[token] += 1


def adjusted(logits: Float, rules: Rules) -> Float:
    """Logits with bias and penalties, -infinity where a token may not be drawn: float32 [V]."""
    v = logits.copy()
    for token, value in rules.bias:
        v[token] = v[token] + F32(value)
    if rules.counts is not None:
        seen = np.flatnonzero(rules.counts)
        n = (rules.counts[seen] & MOST).astype(F32)
        old, repetition = v[seen], F32(rules.repetition)
        new = np.where(old > 0, old / repetition, old * repetition)
        new = new - F32(rules.frequency) * n
        v[seen] = np.where(n > 0, new - F32(rules.presence), new)
    v[[token for token in rules.banned if 0 <= token < len(v)]] = -np.inf
    if rules.allowed is not None:
        ids = np.arange(len(v))
        bits = rules.allowed[ids // 32] >> (ids % 32).astype(np.uint32) & 1
        v[bits == 0] = -np.inf
    return v


def _scaled(v: Float, temperature: float) -> Float:
    """Divided by the temperature, and finite unless banned."""
    with np.errstate(over="ignore"):
        z = v / F32(temperature)
    return np.where(np.isneginf(v), v, np.clip(z, -LARGEST, LARGEST))


def masses(z: Float) -> tuple[Float, Masses]:
    """Weights `exp(z - max z)`, and the same as whole numbers: float32 [V], uint64 [V]."""
    with np.errstate(over="ignore"):  # from the largest float32 to the least is infinity
        weights = exp(z - z.max())
    return weights, (weights * UNIT).astype(np.uint64)


def _share(total: int, part: float) -> int:
    """`part` of a sum, rounded down; at least 1, so that one token reaches it."""
    return max(1, total * int(F32(part) * F32(2.0**32)) >> 32)


def kept(z: Float, rules: Rules) -> npt.NDArray[np.bool_]:
    """The tokens that top_k, top_p and min_p leave: bool [V].

    Args:
        z: scaled logits, float32 [V].
        rules: the settings.
    """
    keep = ~np.isneginf(z)
    weights, mass = masses(z)
    if rules.top_k:
        k = min(rules.top_k, int(keep.sum()))
        keep &= z >= np.partition(z, -k)[-k]
    if rules.top_p < 1:
        levels, level = np.unique(z[keep], return_inverse=True)  # ascending
        sums = np.zeros(len(levels), np.uint64)
        np.add.at(sums, level, mass[keep])
        running = np.cumsum(sums[::-1])
        end = int(np.searchsorted(running, np.uint64(_share(int(running[-1]), rules.top_p))))
        keep &= z >= levels[len(levels) - 1 - end]
    if rules.min_p > 0:
        keep &= weights >= F32(rules.min_p)
    return keep


def draw(logits: Float, rules: Rules, position: int) -> int:
    """The next token of one row.

    Args:
        logits: float32 [V], finite.
        rules: at least one token is allowed.
        position: of the token that was fed.

    Returns:
        A token id; the lower one on a tie.
    """
    v = adjusted(logits, rules)
    ids = np.arange(len(v))
    if rules.temperature:
        z = _scaled(v, rules.temperature)
        ids = np.flatnonzero(kept(z, rules))
        v = z[ids] + gumbel(rules.seed, position, ids)
    return int(ids[np.argmax(order_key(v, ids))])


def logprobs(logits: Float, token: int, n: int) -> tuple[np.float32, npt.NDArray[np.int64], Float]:
    """Natural logarithms of probabilities, by the logits as they are.

    Args:
        logits: float32 [V], finite.
        token: the token that was drawn.
        n: how many of the most likely tokens to tell.

    Returns:
        That of `token`; ids of the n most likely, the most likely first (the lower id on a tie),
        int64 [n]; theirs, float32 [n].
    """
    top = logits.max()
    log_sum = log(masses(logits)[1].sum().astype(F32) * (F32(1) / UNIT))
    keys = order_key(logits, np.arange(len(logits)))
    ids = np.argsort(keys)[::-1][:n]
    values = (logits - top) - log_sum
    return F32(values[token]), ids, values[ids]
