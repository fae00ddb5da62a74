"""Inputs of RMSNorm, for lesson 03, in which a sum in another order shows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mkref.reference.scalars import from_bf16, sum_of_squares, to_bf16

__all__ = ["near_ties"]


def near_ties(
    rows: int, hidden: int, eps: float, seed: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint16]]:
    """x and gamma of which the last bit of r shows in y.

    bf16 keeps 8 of 24 bits, so most values of y would not tell a sum in another order. Half of
    each row are values too small to count in the sum of squares, and each of them is chosen so that
    y lies beside a tie of bf16: with the next float above or below r, or with (r gamma) as a
    product of its own, y would be another word.

    Args:
        rows, hidden: shape of x.
        eps: of the norm.
        seed: of the random part.

    Returns:
        x, float32 [rows, hidden], and gamma, bf16 words [hidden].
    """
    rng = np.random.default_rng([seed, rows, hidden])
    # Of quite different sizes, so that another order of additions has another sum.
    x = (rng.normal(0, 3, (rows, hidden)) * np.exp(rng.normal(0, 1, (rows, hidden)))).astype(
        np.float32
    )
    gamma = to_bf16(rng.uniform(0.5, 2, hidden).astype(np.float32))
    small = np.arange(hidden) % 2 == 1
    x[:, small] = 0
    total = sum_of_squares(x)
    r = (np.float32(1) / np.sqrt(total / np.float32(hidden) + np.float32(eps)))[:, None, None]
    g = from_bf16(gamma)[small][None, :, None]
    odd = 2 * rng.integers(1 << 7, 1 << 8, (rows, int(small.sum()), 1)) + 1  # halves of an ulp
    tie = (odd * 2.0**-31).astype(np.float32)
    near = (tie / (r * g)).astype(np.float32).view(np.uint32) + np.arange(-4, 5).astype(np.uint32)
    near = near.view(np.float32)  # [rows, small, 9]
    now = to_bf16((near * r) * g)
    above, below = (np.nextafter(r, np.float32(end)) for end in (np.inf, -np.inf))
    shows = np.stack(
        [
            now != to_bf16((near * above) * g),
            now != to_bf16((near * below) * g),
            now != to_bf16(near * (r * g)),
        ]
    )
    wanted = np.arange(int(small.sum())) % 3
    chosen = np.take_along_axis(shows, wanted[None, None, :, None], 0)[0].argmax(-1)
    x[:, small] = np.take_along_axis(near, chosen[..., None], -1)[..., 0]
    assert np.array_equal(total, sum_of_squares(x)), "small values count"
    return x, gamma
