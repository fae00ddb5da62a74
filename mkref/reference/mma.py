"""The tensor core's matrix product in NumPy, bit for bit ("One mma" in docs/numerics.md).

`mma` is one instruction, `chain` a row of them, `project` the product of a packed matrix with the
activations in the kernel's order: eight warps, each a chain, added one after another.

The model of one output: 16 exact products and `c`, each cut towards zero to a multiple of
`2^(e - F)` where `e` is the largest exponent among the 17 (a product's is the sum of its operands'
exponents), added exactly, the sum cut towards zero to 24 significant bits.

How it is computed: in float64, where nothing below rounds. `2^e` is a maximum over products of the
operands' powers of two (their mantissa bits masked off), so no logarithm is taken and a zero, whose
masked value is 0, takes no part. The 17 scaled terms are below 2^27 each, so float64 adds them
exactly in any order.

What it does not do: model a GPU other than Hopper. Infinity and NaN follow float32 arithmetic with
the one NaN 0x7fffffff.

Notation: M rows, K depth, n columns (8 in the kernel), W warps (8).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mkref.reference.scalars import Float, Words, from_bf16
from mkref.weights.layout import TILE, TILE_WORDS

__all__ = ["OUT_BITS", "WARPS", "F", "chain", "mma", "project", "sum_warps", "warp_chains"]

F = 25  # bits that are kept below the largest exponent
OUT_BITS = 24  # significant bits of the sum
WARPS = 8

Wide = npt.NDArray[np.float64]

ROW_BLOCK_CHUNK = 16  # row blocks worked on at a time: intermediates stay in the L2 cache
EXPONENT_MASK = np.uint64(0x7FF0000000000000)
SUM_MASK = np.uint64((1 << 64) - (1 << (53 - OUT_BITS)))
MIN_NORMAL = 2.0**-126
MIN_STEP = 2.0**-149
NAN = np.array(0x7FFFFFFF, dtype=np.uint32).view(np.float32)


def _powers(x: Wide) -> Wide:
    """2^exponent of float32 or bfloat16 values held in float64; 0 for 0.

    A subnormal has the smallest exponent, -126, whatever its leading zeros.
    """
    powers = (x.view(np.uint64) & EXPONENT_MASK).view(np.float64)
    return np.where((powers < MIN_NORMAL) & (x != 0), MIN_NORMAL, powers)


def _step(c: Wide, a: Wide, a_powers: Wide, b: Wide, b_powers: Wide) -> Wide:
    """One mma on float64 operands laid out for NumPy: k first, rows last.

    Args:
        c: [..., n, M].
        a, a_powers: [16, ..., 1, M].
        b, b_powers: [16, ..., n, 1].

    Returns:
        float64 [..., n, M], every value a float32.
    """
    largest = np.maximum((a_powers * b_powers).max(axis=0), _powers(c))
    some = largest > 0
    unit = np.where(some, largest, 1.0) * 2.0**-F
    scale = 1.0 / unit  # exact: powers of two
    terms = a * b
    terms *= scale
    np.trunc(terms, out=terms)
    total = terms.sum(axis=0) + np.trunc(c * scale)
    cut = (total.view(np.uint64) & SUM_MASK).view(np.float64) * unit
    small = np.abs(cut) < MIN_NORMAL
    if small.any():
        cut = np.where(small, np.trunc(cut / MIN_STEP) * MIN_STEP, cut)
    return cut + 0.0  # a sum that is cut to nothing is +0


def _special(c: Wide, a: Wide, b: Wide, out: Wide) -> Wide:
    """Infinities and NaN: what float32 addition of the 17 terms gives."""
    with np.errstate(invalid="ignore", over="ignore"):
        plain = (a * b).sum(axis=0) + c
    return np.where(np.isfinite(plain), out, plain)


def _to_float32(x: Wide) -> Float:
    with np.errstate(over="ignore"):
        narrow = x.astype(np.float32)  # exact, except that 2^128 and above become inf
    return np.where(np.isnan(narrow), NAN, narrow)


def _run(c: Wide, a: Wide, b: Wide) -> Wide:
    """Chain of mma. c [..., n, M], a [steps, 16, ..., 1, M], b [steps, 16, ..., n, 1]."""
    finite = bool(np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all())
    a_powers, b_powers = _powers(a), _powers(b)
    for step in range(a.shape[0]):
        with np.errstate(invalid="ignore", over="ignore"):
            out = _step(c, a[step], a_powers[step], b[step], b_powers[step])
        if not finite or not np.isfinite(out).all():
            out = _special(c, a[step], b[step], out)
        # A finite sum beyond float32 is infinite from here on.
        c = np.where(np.abs(out) >= 2.0**128, np.copysign(np.inf, out), out)
    return c


def mma(c: Float, a: Words, b: Words) -> Float:
    """One `mma.sync.m16n8k16`, on matrices in natural order.

    Args:
        c: float32 [..., 16, n].
        a: uint16 [..., 16, 16], rows and k.
        b: uint16 [..., 16, n], k and columns.

    Returns:
        float32 [..., 16, n].
    """
    return chain(c, a, b)


def chain(c: Float, a: Words, b: Words) -> Float:
    """`c <- mma(c, A, B)` over K / 16 tiles, ascending.

    Args:
        c: float32 [..., M, n].
        a: uint16 [..., M, K], K a multiple of 16.
        b: uint16 [..., K, n].

    Returns:
        float32 [..., M, n].
    """
    steps = a.shape[-1] // TILE
    wide_a = np.moveaxis(from_bf16(a).astype(np.float64), -1, 0)[..., None, :]
    wide_b = np.moveaxis(from_bf16(b).astype(np.float64), -2, 0)[..., None]
    wide_c = np.swapaxes(np.asarray(c, dtype=np.float32), -1, -2).astype(np.float64)
    out = _run(
        wide_c,
        np.ascontiguousarray(wide_a).reshape(steps, TILE, *wide_a.shape[1:]),
        np.ascontiguousarray(wide_b).reshape(steps, TILE, *wide_b.shape[1:]),
    )
    return np.ascontiguousarray(np.swapaxes(_to_float32(out), -1, -2))


def _tile_columns(tiles: Words) -> Words:
    """Tiles [row blocks, k tiles, 256] as [k tiles, 16 k, rows]."""
    blocks, k_tiles, _ = tiles.shape
    # k = 8 kh + 2 t + p and row = 8 rh + g, so:
    # [block, kt, g, t, kh, rh, p] -> [kt, kh, t, p, block, rh, g]
    parts = tiles.reshape(blocks, k_tiles, 8, 4, 2, 2, 2).transpose(1, 4, 3, 6, 0, 5, 2)
    return np.ascontiguousarray(parts).reshape(k_tiles, TILE, blocks * TILE)


def warp_chains(tiles: Words, x: Words) -> Float:
    """The eight warps' partial sums of a product, each a chain that starts at 0.

    Args:
        tiles: uint16 [row blocks * K / 16, 256], packed matrix of depth K.
        x: uint16 [n, K], activations in natural order; all-zero rows cost nothing.

    Returns:
        float32 [8, n, M], M = 16 row blocks; warp w has the tiles w, w + 8, w + 16, ...
    """
    n, depth = x.shape
    k_tiles = depth // TILE
    blocks = tiles.reshape(-1, k_tiles, TILE_WORDS)
    out = np.zeros((WARPS, n, blocks.shape[0] * TILE), dtype=np.float32)
    used = np.flatnonzero((x & 0x7FFF).any(axis=1))
    if not used.size:
        return out
    # [K / 16, 16 k, n', 1]
    b = from_bf16(x[used]).astype(np.float64).T.reshape(k_tiles, TILE, used.size, 1)
    for first in range(0, blocks.shape[0], ROW_BLOCK_CHUNK):
        part = blocks[first : first + ROW_BLOCK_CHUNK]
        a = from_bf16(_tile_columns(part)).astype(np.float64)[:, :, None, :]
        c = np.zeros((WARPS, used.size, part.shape[0] * TILE))
        for start in range(0, k_tiles, WARPS):  # one step of up to eight warps at once
            warps = min(WARPS, k_tiles - start)
            stop = start + warps
            # [1 step, 16 k, warps, ..]: the warp is a leading axis of c
            c[:warps] = _run(
                c[:warps],
                np.ascontiguousarray(np.swapaxes(a[start:stop], 0, 1))[None],
                np.ascontiguousarray(np.swapaxes(b[start:stop], 0, 1))[None],
            )
        rows = slice(first * TILE, first * TILE + c.shape[-1])
        out[:, used, rows] = _to_float32(c)
    return out


def sum_warps(partials: Float) -> Float:
    """Add eight partial sums [8, ...] one after another: ((p0 + p1) + p2) + ... + p7."""
    total = partials[0]
    for warp in range(1, WARPS):
        total = total + partials[warp]
    return total


def project(tiles: Words, x: Words) -> Float:
    """Product of a packed matrix with activations, in the kernel's order.

    Args:
        tiles: uint16 [row blocks * K / 16, 256], packed matrix [M, K].
        x: uint16 [n, K], activations in natural order.

    Returns:
        float32 [n, M], x W^T; M includes the rows that padding added.
    """
    return sum_warps(warp_chains(tiles, x))
