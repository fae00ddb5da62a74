"""The tensor core's product in NumPy, bit for bit against exact integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from mkref.reference import arithmetic as ar
from mkref.weights.layout import pack_tiles

F32 = np.float32


def bits(x: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Bit patterns of float32, so that -0, +0 and NaN are told apart."""
    return np.asarray(x, dtype=F32).view(np.uint32)


def exact_mma(c: float, a: npt.NDArray[np.uint16], b: npt.NDArray[np.uint16]) -> float:
    """One output of one mma in Python integers, as docs/numerics.md words it."""

    def split(word: int, mantissa_bits: int) -> tuple[int, int, int]:
        """(sign, exponent, significand scaled by 2^mantissa_bits)"""
        fraction = word & ((1 << mantissa_bits) - 1)
        exponent = (word >> mantissa_bits) & 0xFF
        sign = -1 if word >> (mantissa_bits + 8) else 1
        if exponent == 0:
            return sign, -126, fraction
        return sign, exponent - 127, fraction | 1 << mantissa_bits

    terms = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        (s1, e1, m1), (s2, e2, m2) = split(x, 7), split(y, 7)
        terms.append((s1 * s2, e1 + e2, m1 * m2, 14))
    terms.append((*split(int(bits(c)), 23), 23))
    terms = [term for term in terms if term[2]]
    if not terms:
        return 0.0
    unit = max(term[1] for term in terms) - 25
    total = 0
    for sign, exponent, significand, scaled in terms:
        shift = exponent - scaled - unit
        total += sign * (significand << shift if shift >= 0 else significand >> -shift)
    drop = max(abs(total).bit_length() - 24, -149 - unit, 0)
    value = Fraction((abs(total) >> drop) << drop) * Fraction(2) ** unit
    return math.copysign(float(value), total) if value else 0.0


def random_words(
    rng: np.random.Generator, shape: tuple[int, ...], spread: int
) -> npt.NDArray[np.uint16]:
    """bfloat16 words with exponents spread around 0 and some zeros."""
    scale = 2.0 ** rng.integers(-spread, spread + 1, shape)
    words = ar.to_bf16((rng.standard_normal(shape) * scale).astype(F32))
    words[rng.random(shape) < 0.1] = 0
    return words


@pytest.mark.parametrize("spread", [0, 2, 8, 20, 60])
def test_mma_equals_exact_integers(spread: int) -> None:
    """Bit-equal to Python integers over narrow and wide exponents; 60 reaches the subnormals."""
    rng = np.random.default_rng(spread)
    a = random_words(rng, (6, 16, 16), spread)
    b = random_words(rng, (6, 16, 8), spread)
    c = ar.from_bf16(random_words(rng, (6, 16, 8), spread)) * F32(1.0000011)
    if spread == 60:
        a[:3], b[:3] = ar.to_bf16(ar.from_bf16(a[:3]) * F32(2.0**-70)), b[:3]
        c[:3] = c[:3] * F32(2.0**-120)
    got = ar.mma(c, a, b)
    assert got.dtype == F32
    for i, row, column in np.ndindex(c.shape):
        want = exact_mma(float(c[i, row, column]), a[i, row], b[i, :, column])
        assert bits(want) == bits(got[i, row, column]), (i, row, column)


def test_mma_of_subnormal_factors() -> None:
    """A subnormal factor has exponent -126 however small it is, so more of c is cut."""
    rng = np.random.default_rng(7)
    a, b = np.zeros((16, 16), dtype=np.uint16), np.zeros((16, 8), dtype=np.uint16)
    a[:, 3] = 1 << rng.integers(0, 7, 16)  # 2^-133 .. 2^-127
    b[3] = ar.to_bf16(F32(2.0) ** rng.integers(96, 104, 8).astype(F32))
    c = (rng.standard_normal((16, 8)) * 2.0**-46).astype(F32)
    got = ar.mma(c, a, b)
    want = [[exact_mma(float(c[i, j]), a[i], b[:, j]) for j in range(8)] for i in range(16)]
    assert np.array_equal(bits(want), bits(got))


def test_mma_cuts_where_the_contract_says() -> None:
    """A term 2^-25 below the largest survives, one at 2^-26 is lost, and nothing is rounded up."""
    one = ar.to_bf16(np.ones((16, 16), dtype=F32))
    b = np.zeros((16, 8), dtype=np.uint16)
    b[0] = ar.to_bf16(F32(1.0))
    c = np.zeros((16, 8), dtype=F32)
    b[1] = ar.to_bf16(F32(-(2.0**-25)))
    assert ar.mma(c, one, b)[0, 0] == F32(1 - 2.0**-24)  # 1 - 2^-25, cut to 24 bits
    b[1] = ar.to_bf16(F32(-(2.0**-26)))
    assert ar.mma(c, one, b)[0, 0] == F32(1.0)
    b[1] = ar.to_bf16(F32(1.99 * 2.0**-24))
    assert ar.mma(c, one, b)[0, 0] == F32(1.0)


def test_mma_of_infinities_and_nan() -> None:
    """They follow float32: inf stays, inf - inf and inf * 0 give the one NaN 0x7fffffff."""
    a = np.zeros((16, 16), dtype=np.uint16)
    b = np.zeros((16, 8), dtype=np.uint16)
    c = np.zeros((16, 8), dtype=F32)
    a[0, 0], a[1, 0], a[2, 0], a[2, 1], a[3, 0] = 0x7F80, 0x7FC0, 0x7F80, 0xFF80, 0x7F7F
    b[0, 0], b[1, 0] = 0x3F80, 0x3F80
    b[0, 1] = 0x7F7F  # the largest finite, squared in row 3
    got = bits(ar.mma(c, a, b))
    assert got[:4, 0].tolist() == [0x7F800000, 0x7FFFFFFF, 0x7FFFFFFF, 0x7F7F0000]
    assert got[3, 1] == 0x7F800000
    assert got[0, 2] == 0x7FFFFFFF  # inf * 0
    assert np.all(got[4:] == 0)


def test_chain_is_mma_after_mma() -> None:
    """chain over K equals single mma calls in ascending k, with leading axes."""
    rng = np.random.default_rng(8)
    a, b = random_words(rng, (3, 32, 64), 3), random_words(rng, (3, 64, 8), 3)
    c = rng.standard_normal((3, 32, 8)).astype(F32)
    want = c
    for k in range(0, 64, 16):
        want = np.concatenate(
            [ar.mma(want[:, r : r + 16], a[:, r : r + 16, k : k + 16], b[:, k : k + 16])
             for r in (0, 16)],
            axis=1,
        )  # fmt: skip
    assert np.array_equal(bits(want), bits(ar.chain(c, a, b)))


@pytest.mark.parametrize("depth", [16, 112, 128, 304])
def test_project_runs_eight_warps_in_order(depth: int) -> None:
    """Tile kt belongs to warp kt % 8; partial sums are added one after another; float64 is near."""
    rng = np.random.default_rng(depth)
    weights, x = random_words(rng, (64, depth), 1), random_words(rng, (8, depth), 1)
    x[2] = x[5] = 0
    partials = ar.warp_chains(pack_tiles(weights), x)
    got = ar.project(pack_tiles(weights), x)
    total = None
    for warp in range(8):
        tiles = [k for k in range(depth) if k // 16 % 8 == warp]
        want = np.zeros((64, 8), dtype=F32)
        if tiles:
            want = ar.chain(want, weights[:, tiles], x.T[tiles])
        assert np.array_equal(bits(want.T), bits(partials[warp]))
        total = want if total is None else total + want
    assert total is not None
    assert np.array_equal(bits(total.T), bits(got))
    assert np.all(bits(got[[2, 5]]) == 0)
    wide_x, wide_w = ar.from_bf16(x).astype(np.float64), ar.from_bf16(weights).astype(np.float64)
    # Every mma loses at most 17 units of 2^-25 of the largest term, and 2^-23 of the sum.
    bound = (np.abs(wide_x) @ np.abs(wide_w).T) * 2.0**-19
    assert np.all(np.abs(got - wide_x @ wide_w.T) <= bound)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The same column alone or among eight gives the same bits."""
    rng = np.random.default_rng(9)
    tiles = pack_tiles(random_words(rng, (48, 256), 2))
    x = random_words(rng, (8, 256), 2)
    together = ar.project(tiles, x)
    for row in range(8):
        assert np.array_equal(bits(ar.project(tiles, x[row : row + 1])[0]), bits(together[row]))
