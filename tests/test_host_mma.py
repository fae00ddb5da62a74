"""The emulated `mma.sync.m16n8k16`: fragment layout and the bits of its sums.

Both are written down here a second time: the layout as the index formulas of the PTX manual
("Matrix Fragments for mma.m16n8k16"), the arithmetic as docs/numerics.md, "One mma", in NumPy
integers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mkref.machine import hostcc

KERNELS = (Path(__file__).parent / "host_kernels" / "mma.cu").read_text()
FRACTION_BITS = 25
NAN = 0x7FFFFFFF


def bf16_value(bits: np.ndarray) -> np.ndarray:
    """float64 values of bf16 words."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def random_bf16(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Normal values rounded (towards zero) to bf16 words."""
    values = (rng.standard_normal(shape) * scale).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def fragments(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Elements (rows[lane, i], columns[lane, i]) of the last two axes: [..., 32, registers]."""
    return matrix[..., rows, columns]


LANE = np.arange(32)[:, None]
GROUP, IN_GROUP = LANE >> 2, LANE & 3
# PTX: a_i, i = 0..7: row = g for i in {0,1,4,5} else g + 8; col = 2t + (i & 1) (+ 8 for i >= 4)
I8 = np.arange(8)[None, :]
A_ROW = np.where((I8 < 2) | ((I8 >= 4) & (I8 < 6)), GROUP, GROUP + 8)
A_COLUMN = IN_GROUP * 2 + (I8 & 1) + np.where(I8 >= 4, 8, 0)
# b_i, i = 0..3: row = 2t + (i & 1) (+ 8 for i >= 2); col = g
I4 = np.arange(4)[None, :]
B_ROW = IN_GROUP * 2 + (I4 & 1) + np.where(I4 >= 2, 8, 0)
B_COLUMN = GROUP + 0 * I4
# c_i, i = 0..3: row = g for i < 2 else g + 8; col = 2t + (i & 1)
C_ROW = np.where(I4 < 2, GROUP, GROUP + 8)
C_COLUMN = IN_GROUP * 2 + (I4 & 1)


def split(bits: np.ndarray, exponent_at: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sign, significand and exponent of float words whose fraction has `exponent_at` bits."""
    bits = bits.astype(np.int64)
    field = bits >> exponent_at & 0xFF
    hidden = np.where(field > 0, 1 << exponent_at, 0)
    sign = np.where(bits >> (exponent_at + 8) & 1, -1, 1)
    return sign, (bits & ((1 << exponent_at) - 1)) + hidden, np.maximum(field, 1) - 127


def one_mma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """docs/numerics.md: a [n,16,16], b [n,16,8] bf16 words, c [n,16,8] float32 -> float32."""
    a4, b4 = a[:, :, :, None], b[:, None, :, :]  # [n, row, k, 1], [n, 1, k, column]
    sign_a, value_a, exponent_a = split(a4, 7)
    sign_b, value_b, exponent_b = split(b4, 7)
    sign_c, value_c, exponent_c = split(c.view(np.uint32), 23)
    products = value_a * value_b  # 14 fraction bits
    exponents = np.where(products > 0, exponent_a + exponent_b, -10000)
    largest = np.maximum(exponents.max(axis=2), np.where(value_c > 0, exponent_c, -10000))
    cut = np.minimum(largest[:, :, None] - exponents, 62)
    terms = sign_a * sign_b * ((products << (FRACTION_BITS - 14)) >> cut)
    start = sign_c * ((value_c << (FRACTION_BITS - 23)) >> np.minimum(largest - exponent_c, 62))
    total = terms.sum(axis=2) + np.where(value_c > 0, start, 0)
    magnitude = np.abs(total)
    length = np.frexp(magnitude.astype(np.float64))[1]  # bits of an integer below 2**53
    unit = largest - FRACTION_BITS
    drop = np.clip(np.maximum(length - 24, -149 - unit), 0, 62)
    with np.errstate(over="ignore", invalid="ignore"):
        result = np.ldexp((magnitude >> drop).astype(np.float64), unit + drop).astype(np.float32)
        result = np.where(total < 0, -result, result) + np.float32(0)  # never -0
        plain = (bf16_value(a4) * bf16_value(b4)).sum(axis=2) + c.astype(np.float64)
    special = ~np.isfinite(plain)
    result[special] = plain[special].astype(np.float32)
    words = result.view(np.uint32)
    words[np.isnan(plain)] = NAN
    return words.view(np.float32)


def run(a: np.ndarray, b: np.ndarray, c: np.ndarray, **options: int) -> np.ndarray:
    """The kernel on matrices [n,16,16], [n,16,8], [n,16,8]."""
    n = len(a)
    a_words = np.ascontiguousarray(fragments(a, A_ROW, A_COLUMN)).view(np.uint32)
    b_words = np.ascontiguousarray(fragments(b, B_ROW, B_COLUMN)).view(np.uint32)
    out = np.ascontiguousarray(fragments(c, C_ROW, C_COLUMN))
    module = hostcc.build(KERNELS, name="mma")
    module.get_function("fragments")((2,), (32,), (out, a_words, b_words, np.int32(n)), **options)
    result = np.full(c.shape, np.nan, np.float32)
    result[:, C_ROW, C_COLUMN] = out
    return result


def check(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Bits of the kernel equal bits of the model."""
    expected, actual = one_mma(a, b, c).view(np.uint32), run(a, b, c).view(np.uint32)
    wrong = np.argwhere(expected != actual)
    assert [] == [
        (tuple(map(int, i)), hex(expected[tuple(i)]), hex(actual[tuple(i)])) for i in wrong[:5]
    ]


def test_layout() -> None:
    """With small integers every sum is exact, so the product tells where each element went."""
    rng = np.random.default_rng(1)
    a = random_bf16(rng, (4, 16, 16), 0)
    a[:] = (rng.integers(-8, 9, a.shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    b = (rng.integers(-8, 9, (4, 16, 8)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    c = rng.integers(-100, 101, (4, 16, 8)).astype(np.float32)
    expected = bf16_value(a) @ bf16_value(b) + c
    assert np.array_equal(expected.astype(np.float32), run(a, b, c))


@pytest.mark.parametrize("scale_c", [0.0, 1e-3, 1.0, 1e4])
def test_ordinary_values(scale_c: float) -> None:
    """Weights and activations as in a model."""
    rng = np.random.default_rng(2)
    a, b = random_bf16(rng, (300, 16, 16), 0.05), random_bf16(rng, (300, 16, 8), 1.0)
    check(a, b, (rng.standard_normal((300, 16, 8)) * scale_c).astype(np.float32))


def test_zero_columns_rows_and_signs() -> None:
    """Columns and rows of zeros leave c alone; minus zero becomes plus zero."""
    rng = np.random.default_rng(3)
    a, b = random_bf16(rng, (200, 16, 16), 1.0), random_bf16(rng, (200, 16, 8), 1.0)
    c = rng.standard_normal((200, 16, 8)).astype(np.float32)
    b[:, :, 1:] *= rng.integers(0, 2, (200, 1, 7)).astype(np.uint16)
    a *= rng.integers(0, 2, (200, 16, 1)).astype(np.uint16)
    a[rng.random(a.shape) < 0.2] = 0x8000
    c[rng.random(c.shape) < 0.3] = -0.0
    c[rng.random(c.shape) < 0.1] = np.float32(1e-44)
    check(a, b, c)


def test_cancellation() -> None:
    """Large terms of both signs, c about minus the sum of the products."""
    rng = np.random.default_rng(4)
    a, b = random_bf16(rng, (300, 16, 16), 1.0), random_bf16(rng, (300, 16, 8), 1.0)
    a[:, :, 8:] = a[:, :, :8] ^ 0x8000
    b[:, 8:] = b[:, :8]
    b[:, 8:] ^= rng.integers(0, 2, (300, 8, 8)).astype(np.uint16)
    c = -(bf16_value(a) @ bf16_value(b)).astype(np.float32)
    check(a, b, c)


def test_every_exponent() -> None:
    """Any finite bf16 and float32 bits, denormals included; sums may overflow or underflow."""
    rng = np.random.default_rng(5)
    a = rng.integers(0, 0x10000, (600, 16, 16)).astype(np.uint16)
    b = rng.integers(0, 0x10000, (600, 16, 8)).astype(np.uint16)
    c = rng.integers(0, 1 << 32, (600, 16, 8), dtype=np.uint64).astype(np.uint32)
    narrow = rng.integers(0, 255, (600, 1, 1))  # operands of one mma share a range of exponents
    spread = rng.integers(0, 30, a.shape)
    a = (a & 0x807F) | (np.clip(narrow + spread - 15, 0, 254) << 7).astype(np.uint16)
    other = rng.integers(0, 255, (600, 1, 1))
    b = (b & 0x807F) | (np.clip(other + rng.integers(0, 30, b.shape) - 15, 0, 254) << 7).astype(
        np.uint16
    )
    field = np.clip(narrow + other - 127 + rng.integers(-40, 40, c.shape), 0, 254)
    c = ((c & 0x807FFFFF) | (field << 23).astype(np.uint32)).view(np.float32)
    check(a, b, c)


def test_infinities_and_nan() -> None:
    """Non-finite operands follow plain float arithmetic; every NaN is the hardware's 0x7fffffff."""
    rng = np.random.default_rng(6)
    a, b = random_bf16(rng, (300, 16, 16), 1.0), random_bf16(rng, (300, 16, 8), 1.0)
    c = rng.standard_normal((300, 16, 8)).astype(np.float32)
    a[rng.random(a.shape) < 0.005] = 0x7F80
    a[rng.random(a.shape) < 0.002] = 0x7FC1
    b[rng.random(b.shape) < 0.01] = 0xFF80
    b[:, :, rng.integers(0, 8, 3)] = 0
    c[rng.random(c.shape) < 0.02] = np.inf
    c[rng.random(c.shape) < 0.02] = np.nan
    check(a, b, c)
