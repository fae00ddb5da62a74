"""Choosing experts and drawing tokens, bit for bit as docs/numerics.md writes it, in NumPy.

A largest value with the lower id on a tie is one comparison of integers (`order_key`). Random
numbers are a pure function of (seed, position, token id): no state, so a token does not depend on
the batch, the slot or the order of anything.

What it does not do: top-p, penalties or any other filter; `mkref.reference.drawing` does.

Sources: Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

Notation: E experts, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mkref.reference.scalars import F32, Float, log, sigmoid

__all__ = ["gumbel", "order_key", "philox", "router_scores", "sample", "top_k"]

PHILOX_M = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
BELOW_ONE = F32(1 - 2.0**-24)


def order_key(values: Float, ids: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """One integer per value whose order is: larger value first, lower id on a tie.

    Args:
        values: float32 [...], no NaN; -0 equals +0.
        ids: integers below 2^32, broadcast against `values`.

    Returns:
        uint64 [...]; the largest key wins.
    """
    bits = (np.asarray(values, dtype=F32) + F32(0)).view(np.uint32)
    # Order of floats as unsigned integers: flip all bits of negatives, the sign bit of others.
    mapped = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(0x80000000))
    low = np.uint64(0xFFFFFFFF) - np.asarray(ids).astype(np.uint64)
    return (mapped.astype(np.uint64) << np.uint64(32)) | low


def top_k(logits: Float, k: int) -> npt.NDArray[np.int64]:
    """Ids of the k largest of float32 [..., E], ascending id, [..., k]; ties go to the lower id."""
    keys = order_key(logits, np.arange(logits.shape[-1]))
    winners = np.argsort(keys, axis=-1)[..., -k:]
    return np.sort(winners, axis=-1)


def router_scores(
    logits: Float, k: int, norm_topk_prob: bool
) -> tuple[npt.NDArray[np.int64], Float]:
    """Chosen experts in ascending id, int64 [..., k], and their scores, float32 [..., k]."""
    ids = top_k(logits, k)
    scores = sigmoid(np.take_along_axis(logits, ids, axis=-1))
    if norm_topk_prob:
        total = scores[..., 0]
        for i in range(1, k):
            total = total + scores[..., i]
        scores = scores / total[..., None]
    return ids, scores


def philox(counter: npt.ArrayLike, key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Philox4x32-10.

    Args:
        counter: [..., 4] words of 32 bits.
        key: two words of 32 bits.

    Returns:
        uint32 [..., 4].
    """
    low32 = np.uint64(0xFFFFFFFF)
    words = np.asarray(counter).astype(np.uint64)
    c0, c1, c2, c3 = (words[..., i] for i in range(4))
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * PHILOX_M[0], c2 * PHILOX_M[1]
        high = np.uint64(32)
        c0, c1, c2, c3 = (
            (p1 >> high) ^ c1 ^ np.uint64(k0),
            p1 & low32,
            (p0 >> high) ^ c3 ^ np.uint64(k1),
            p0 & low32,
        )
        k0, k1 = (k0 + PHILOX_W[0]) & 0xFFFFFFFF, (k1 + PHILOX_W[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def gumbel(seed: int, position: int, ids: npt.ArrayLike) -> Float:
    """Gumbel noise of token ids.

    Args:
        seed: the request's 64-bit seed.
        position: position of the token that is fed.
        ids: token ids [...].

    Returns:
        float32 [...].
    """
    tokens = np.asarray(ids).astype(np.int64)
    counter = np.zeros((*tokens.shape, 4), dtype=np.int64)
    counter[..., 0] = tokens // 4
    counter[..., 1] = position
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    r = np.take_along_axis(words, (tokens % 4)[..., None], axis=-1)[..., 0]
    u = ((r >> np.uint32(8)).astype(F32) + F32(0.5)) * F32(2.0**-24)
    # 0xffffff + 0.5 rounds up to 2^24: u would be 1 and log(-log(1)) has no value.
    u = np.fmin(u, BELOW_ONE)
    return -log(-log(u))


def sample(logits: Float, temperature: float, seed: int, position: int) -> int:
    """The next token of one row.

    Args:
        logits: float32 [V].
        temperature: 0 takes the largest logit.
        seed: the request's 64-bit seed.
        position: position of the token that was fed.

    Returns:
        A token id; the lower one on a tie.
    """
    ids = np.arange(logits.shape[0])
    values = logits
    if temperature:
        values = logits / F32(temperature) + gumbel(seed, position, ids)
    return int(np.argmax(order_key(values, ids)))
