"""The interpreter's fast products, against `mkref.reference.mma`: the same bits for every input."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from mkref.plan.products import LOWEST, Matrix, Operand, Unsafe, chain, columns, step
from mkref.reference import mma
from mkref.reference.scalars import from_bf16, to_bf16
from mkref.weights.layout import pack_tiles

Words = npt.NDArray[np.uint16]


def words(rng: np.random.Generator, shape: tuple[int, ...], spread: float, scale: float) -> Words:
    """Random bfloat16 around 2^scale, some factor of up to 2^spread off, and zeros of each sign."""
    values = rng.standard_normal(shape) * np.exp2(rng.uniform(-spread, spread, shape) + scale)
    out = to_bf16(values.astype(np.float32))
    out[rng.random(shape) < 0.05] = 0
    out[rng.random(shape) < 0.05] = 0x8000
    return out


def same(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Equal bit patterns."""
    return a.dtype == b.dtype == np.float32 and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("depth", [16, 48, 128, 272])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_projection_has_the_bits_of_the_model(depth: int, n: int) -> None:
    """Narrow and wide ranges, near the lowest and highest exponents, and past both ends."""
    rng = np.random.default_rng(depth + n)
    for spread, scale in ((0, 0), (3, 0), (12, 0), (40, 0), (2, -60), (2, 62), (30, -50), (30, 50)):
        tiles = pack_tiles(words(rng, (52, depth), spread, scale))
        x = words(rng, (n, depth), spread, scale)
        with np.errstate(all="ignore"):
            expected = mma.warp_chains(tiles, x)
            got = Matrix(tiles, depth // 16).chains(columns(x))
        assert same(expected, got), (spread, scale)


def test_special_values_go_the_slow_way() -> None:
    """Infinity, NaN and subnormals among weights or activations."""
    rng = np.random.default_rng(5)
    tiles, x = pack_tiles(words(rng, (32, 64), 2, 0)), words(rng, (4, 64), 2, 0)
    for special in (0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x8070):
        damaged_tiles, damaged_x = tiles.copy(), x.copy()
        damaged_tiles[3, 7] = special
        damaged_x[2, 40] = special
        for a, b in ((damaged_tiles, x), (tiles, damaged_x), (damaged_tiles, damaged_x)):
            with np.errstate(all="ignore"):
                expected = mma.warp_chains(a, b)
                got = Matrix(a, 4).chains(columns(b))
            assert np.array_equal(expected.view(np.uint32), got.view(np.uint32))


def test_part_of_a_matrix() -> None:
    """Row blocks from the middle are those of the whole."""
    rng = np.random.default_rng(6)
    matrix = Matrix(pack_tiles(words(rng, (96, 160), 4, 0)), 10)
    x = columns(words(rng, (2, 160), 4, 0))
    assert same(matrix.project(x)[:, 32:80], matrix.project(x, first=2, n_blocks=3))


@pytest.mark.parametrize("start", ["zero", "small", "large", "infinite"])
def test_chain_has_the_bits_of_the_model(start: str) -> None:
    """Many products side by side, each with a c of its own to begin with."""
    rng = np.random.default_rng(7)
    a, b = words(rng, (5, 64, 48), 6, 0), words(rng, (5, 64, 3), 6, 0)
    c = rng.standard_normal((5, 3, 48)).astype(np.float32)
    c *= {"zero": 0, "small": 1e-12, "large": 1e9, "infinite": np.inf}[start]
    with np.errstate(all="ignore"):
        expected = mma.chain(c.swapaxes(1, 2), a.swapaxes(1, 2), b).swapaxes(1, 2)
        got = chain(c, a, b)
    assert np.array_equal(expected.view(np.uint32), got.view(np.uint32))


def test_sixteen_largest_products_do_not_overflow() -> None:
    """The largest significands, all of one sign, on top of a c of the same exponent."""
    largest = np.full((1, 16, 1, 1), 0x3FFF, dtype=np.uint16)  # 1.9921875
    for sign in (0, 0x8000):
        a = Operand.of(largest | np.uint16(sign))
        c = np.full((1, 1, 1), 1.9999999 * (-1 if sign else 1), dtype=np.float32)
        expected = mma.mma(c[0], np.repeat(largest[0, :, 0, 0][None] | np.uint16(sign), 16, 0)[:16],
                           largest[0, :, :, 0])[:1]  # fmt: skip
        assert same(np.ascontiguousarray(expected[None]), step(c, a, Operand.of(largest)))


def test_step_refuses_what_float32_cannot_hold() -> None:
    """Exponents out of range raise; all zeros do not."""
    one, tiny = (
        to_bf16(np.ones((1, 16, 1, 1))),
        to_bf16(np.full((1, 16, 1, 1), 2.0 ** (LOWEST - 1))),
    )
    assert step(None, Operand.of(one), Operand.of(one)).item() == 16
    assert step(None, Operand.of(one * np.uint16(0)), Operand.of(one)).item() == 0
    for a in (tiny, to_bf16(np.full((1, 16, 1, 1), np.inf)), to_bf16(np.full((1, 16, 1, 1), 2e38))):
        with pytest.raises(Unsafe):
            step(None, Operand.of(a), Operand.of(one))


def test_operands_keep_values() -> None:
    """Exponents of all bfloat16 words: that of the value, or out of the way."""
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    operand, values = Operand.of(every), from_bf16(every)
    normal = np.isfinite(values) & (np.abs(values) >= 2.0**-126)
    expected = np.frexp(values[normal].astype(np.float64))[1] - 1
    assert np.array_equal(expected, operand.exponents[normal])
    assert np.all(operand.exponents[values == 0] == -512)
    assert np.all(operand.exponents[~np.isfinite(values)] == 1000)
