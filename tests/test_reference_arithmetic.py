"""The kernel's arithmetic in NumPy, against exact integers, float64 and published vectors."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mkref.reference import arithmetic as ar

F32 = np.float32


def bits(x: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Bit patterns of float32, so that -0, +0 and NaN are told apart."""
    return np.asarray(x, dtype=F32).view(np.uint32)


# bfloat16


def test_bf16_rounding_agrees_with_torch() -> None:
    """Random bit patterns, every tie, infinities and NaN; torch writes NaN as 0x7fc0, we 0x7fff."""
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    ties = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)
    values = np.concatenate([words, ties]).view(F32)
    got = ar.to_bf16(values)
    want = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    assert np.array_equal(want[number], got[number])
    assert np.all(got[~number] == 0x7FFF)
    assert (~number).sum() > 1000
    assert ar.to_bf16(np.uint32(0xFFFFFFFF).view(F32)) == 0x7FFF


def test_bf16_round_trip_is_exact() -> None:
    """Every bfloat16 that is a number survives widening and rounding."""
    words = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = ar.from_bf16(words)
    number = ~np.isnan(values)
    assert np.array_equal(words[number], ar.to_bf16(values)[number])


# exp2, exp, log


def test_exp2_error_bound() -> None:
    """Relative error below 2 * 2^-23 over its whole range (float64 oracle); edges exact."""
    x = np.linspace(-126, 127, 2_000_001).astype(F32)
    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(ar.exp2(x) - exact) / exact) < 2 * 2.0**-23
    whole = np.arange(-126, 128)
    assert np.array_equal(bits(2.0**whole), bits(ar.exp2(whole)))
    edges = [-np.inf, -1000.0, np.nextafter(F32(-126), F32(-127)), 127.5, np.inf, np.nan]
    assert np.array_equal(bits([0, 0, 0, 2.0**127, 2.0**127, 2.0**127]), bits(ar.exp2(edges)))


def test_exp_error_bound() -> None:
    """exp rounds its argument once: relative error below (|x log2 e| / 2 + 3) * 2^-23."""
    x = np.linspace(-87, 87, 1_000_001).astype(F32)
    exact = np.exp(x.astype(np.float64))
    bound = (np.abs(x) * math.log2(math.e) / 2 + 3) * 2.0**-23
    assert np.all(np.abs(ar.exp(x) - exact) / exact < bound)


def test_log_error_bound() -> None:
    """Below 1.5 ulp of the result over all exponents and close to 1 (float64 oracle)."""
    rng = np.random.default_rng(2)
    wide = rng.integers(1 << 23, 255 << 23, 1_000_000, dtype=np.uint32).view(F32)
    near = rng.uniform(0.5, 2.0, 1_000_000).astype(F32)
    for x in (wide, near):
        exact = np.log(x.astype(np.float64))
        ulp = np.spacing(np.abs(exact).astype(F32)).astype(np.float64)
        assert np.all(np.abs(ar.log(x) - exact) < 1.5 * ulp)
    assert bits(ar.log(1.0)) == bits(0.0)


def test_log_splits_at_the_square_root_of_two() -> None:
    """The reduced mantissa lies in [sqrt(1/2), sqrt(2)), both as float32: at and below the seam."""
    seam, below = np.array([0x3F3504F3, 0x3FB504F2], dtype=np.uint32).view(F32)
    assert seam == F32(math.sqrt(0.5))
    for m in (seam, below):
        f = m - F32(1)
        z = f * f
        y = F32(0.0703768358)
        for q in (
            -0.115146101, 0.116769984, -0.124201410, 0.142493233, -0.166680574, 0.200007141,
            -0.249999940, 0.333333313,
        ):  # fmt: skip
            y = y * f + F32(q)
        y = y * f * z - F32(0.5) * z
        for e in range(-124, 126):
            want = (f + y) + F32(e) * F32(0.693147182)
            assert bits(want) == bits(ar.log(m * F32(2.0) ** F32(e)))


def test_sigmoid_and_swiglu() -> None:
    """Relative error of sigmoid below 1e-5 down to exp(-80); SwiGLU within one bf16 rounding."""
    x = np.linspace(-80, 80, 100_001).astype(F32)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert np.max(np.abs(ar.sigmoid(x) - exact) / exact) < 1e-5
    up = np.linspace(3, -2, x.size).astype(F32)
    product = x * exact * up
    error = np.abs(ar.from_bf16(ar.swiglu(x, up)) - product)
    assert np.all(error <= np.abs(product) * (2.0**-8 * 1.001) + 1e-38)


# RMSNorm, rotary


@pytest.mark.parametrize("width", [16, 240, 1024, 1040, 2048, 4112])
def test_rmsnorm_order_of_additions(width: int) -> None:
    """Bit-equal to a scalar loop that adds in the written order; close to float64."""
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((3, width)) * 4).astype(F32)
    gamma = ar.to_bf16(rng.uniform(0.5, 1.5, width).astype(F32))
    got = ar.rmsnorm(x, gamma, 1e-6)
    for row in range(3):
        s = [F32(0)] * 256
        for i in range(width):
            s[i // 4 % 256] = s[i // 4 % 256] + x[row, i] * x[row, i]
        groups = []
        for g in range(8):
            lanes = s[32 * g : 32 * g + 32]
            for step in (16, 8, 4, 2, 1):
                lanes = [lanes[t] + lanes[t ^ step] for t in range(32)]
            groups.append(lanes[0])
        total = groups[0]
        for group in groups[1:]:
            total = total + group
        assert bits(total) == bits(ar.sum_of_squares(x[row]))
        r = F32(1) / np.sqrt(total / F32(width) + F32(1e-6))
        assert np.array_equal(ar.to_bf16((x[row] * r) * ar.from_bf16(gamma)), got[row])
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * ar.from_bf16(gamma)
    assert np.all(np.abs(ar.from_bf16(got) - exact) <= np.abs(exact) * 2.0**-8 * 1.001)


@pytest.mark.parametrize("theta", [10000.0, 50000.0, 1e6])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_rotary_frequencies_are_within_an_ulp_of_torch(head_dim: int, theta: float) -> None:
    """torch's float32 pow is not correctly rounded: its frequencies may be one ulp off ours."""
    want = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    got = ar.rotary_inv_freq(head_dim, theta)
    assert got.dtype == F32
    assert np.max(np.abs(bits(want.numpy()).astype(np.int64) - bits(got))) <= 1


def test_rotary_table_and_rotation() -> None:
    """cos and sin of the float32 angle, correctly rounded; pairs turn as complex numbers."""
    positions = np.array([0, 1, 4095, 262143])
    cos, sin = ar.rotary_table(positions, 64, 50000.0)
    angle = (positions.astype(F32)[:, None] * ar.rotary_inv_freq(64, 50000.0)).astype(np.float64)
    assert np.array_equal(np.cos(angle).astype(F32), cos)
    assert np.array_equal(np.sin(angle).astype(F32), sin)
    x = np.random.default_rng(3).standard_normal((4, 64)).astype(F32)
    turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angle)
    got = ar.rotate(x, cos, sin)
    assert np.max(np.abs(got[:, 0::2] - turned.real)) < 1e-6
    assert np.max(np.abs(got[:, 1::2] - turned.imag)) < 1e-6
    assert ar.score_scale(128) == F32(math.log2(math.e) / math.sqrt(128))


# Order, router, random numbers


def test_order_key_and_top_k() -> None:
    """Larger first, lower id on a tie, -0 equal to +0, infinities at the ends."""
    values = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 1.0, 1e-45, -1e-45], dtype=F32)
    order = np.argsort(ar.order_key(values, np.arange(9)))[::-1]
    assert order.tolist() == [4, 2, 6, 7, 0, 1, 8, 3, 5]
    rng = np.random.default_rng(4)
    logits = rng.integers(-4, 5, (200, 32)).astype(F32)  # many ties
    got = ar.top_k(logits, 8)
    for row in range(200):
        ranked = sorted(range(32), key=lambda e: (-logits[row, e], e))
        assert sorted(ranked[:8]) == got[row].tolist()


@pytest.mark.parametrize("normalise", [False, True])
def test_router_scores(normalise: bool) -> None:
    """Scores are sigmoids, divided by their sum (added in ascending id) if asked."""
    logits = np.random.default_rng(5).standard_normal((50, 16)).astype(F32)
    ids, scores = ar.router_scores(logits, 4, normalise)
    picked = np.take_along_axis(logits, ids, axis=1).astype(np.float64)
    exact = 1 / (1 + np.exp(-picked))
    if normalise:
        exact /= exact.sum(axis=1, keepdims=True)
    assert np.max(np.abs(scores - exact)) < 3e-7
    assert np.all(np.diff(ids, axis=1) > 0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(
    counter: list[int], key: tuple[int, int], expected: list[int]
) -> None:
    """The known-answer vectors that its authors publish with Random123."""
    assert ar.philox(counter, key).tolist() == expected


def test_gumbel_is_a_function_of_seed_position_and_id() -> None:
    """Word id % 4 of counter (id / 4, position, 0, 0); moments of the Gumbel distribution."""
    seed = 0x0123456789ABCDEF
    noise = ar.gumbel(seed, 77, np.arange(200_000))
    for token in (0, 1, 2, 3, 4, 99_999):
        word = ar.philox([token // 4, 77, 0, 0], (0x89ABCDEF, 0x01234567))[token % 4]
        u = (F32(word >> np.uint32(8)) + F32(0.5)) * F32(2.0**-24)
        assert bits(noise[token]) == bits(-ar.log(-ar.log(u)))
        assert abs(noise[token] + math.log(-math.log(float(u)))) < 1e-5
    assert abs(noise.mean() - 0.5772157) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    assert not np.array_equal(noise[:100], ar.gumbel(seed, 78, np.arange(100)))
    assert not np.array_equal(noise[:100], ar.gumbel(seed + (1 << 32), 77, np.arange(100)))


def test_gumbel_of_the_largest_word_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """(0xffffff + 0.5) rounds up to 2^24 in float32; the noise stays below that of 1 - 2^-24."""
    full = np.full((1, 4), 0xFFFFFFFF, dtype=np.uint32)
    monkeypatch.setattr("mkref.reference.sampling.philox", lambda counter, key: full)
    assert 16 < float(ar.gumbel(0, 0, [0])[0]) < 17


def test_sample() -> None:
    """Temperature 0 is the lowest id of the largest; frequencies follow softmax(logits / T)."""
    logits = np.array([1.0, 3.0, 3.0, -2.0], dtype=F32)
    assert ar.sample(logits, 0, 1, 1) == 1
    draws = [ar.sample(logits, 2.0, 42, position) for position in range(4000)]
    weights = np.exp(logits.astype(np.float64) / 2)
    expected = weights / weights.sum()
    got = np.bincount(draws, minlength=4) / 4000
    assert np.max(np.abs(got - expected)) < 0.03  # four standard deviations of a frequency
