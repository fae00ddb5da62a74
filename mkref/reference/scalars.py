"""The kernel's scalar functions in NumPy, bit for bit as docs/numerics.md writes them.

Every function works in float32 with one rounding per operation and no fused multiply-add, which is
what NumPy does anyway; the order of every sum is spelled out. bfloat16 values are uint16 words.
The matrix product is in `mma`, choosing and drawing in `sampling`; `arithmetic` gathers all three.

What it does not do: run a model (`mkref.plan.interpret` does, with these functions), or chase
accuracy: the polynomials are the kernel's, their errors are bounded in the tests.

Notation: H hidden size, D head dimension.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = [
    "exp",
    "exp2",
    "from_bf16",
    "log",
    "rmsnorm",
    "rotary_inv_freq",
    "rotary_table",
    "rotate",
    "score_scale",
    "sigmoid",
    "sum_of_squares",
    "swiglu",
    "to_bf16",
]

Float = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint16]

F32 = np.float32
ONE = F32(1)
LOG2_E = F32(1.44269502)
LN_2 = F32(0.693147182)
MAGIC = F32(12582912)  # 1.5 * 2^23: adding and subtracting it rounds to an integer
# Coefficients, highest power first.
EXP2 = np.array(
    [0.000154034632, 0.00133953290, 0.00961813703, 0.0555028692, 0.240226462, 0.693147182, 1.0],
    dtype=F32,
)
LOG = np.array(
    [
        0.0703768358, -0.115146101, 0.116769984, -0.124201410, 0.142493233,
        -0.166680574, 0.200007141, -0.249999940, 0.333333313,
    ],
    dtype=F32,
)  # fmt: skip
SQRT_2_BITS = 0x3FB504F3  # sqrt(2) in float32; its half is sqrt(1/2) in float32


def to_bf16(x: npt.ArrayLike) -> Words:
    """Round float32 to bfloat16 words, nearest even; NaN becomes 0x7fff.

    >>> hex(int(to_bf16(1.00390625)))  # half way between 0x3f80 and 0x3f81: even wins
    '0x3f80'
    """
    values = np.asarray(x, dtype=F32)
    nan = np.isnan(values)
    bits = np.where(nan, F32(0), values).view(np.uint32)
    # Half a unit, or just less where the kept part is even: a tie then stays even.
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    words = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return np.where(nan, np.uint16(0x7FFF), words)


def from_bf16(words: npt.ArrayLike) -> Float:
    """Widen bfloat16 words to float32; exact."""
    return (np.asarray(words, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(F32)


def _power_of_two(n: npt.NDArray[np.int32]) -> Float:
    return ((n + np.int32(127)) << np.int32(23)).view(F32)


def exp2(x: npt.ArrayLike) -> Float:
    """2^x; 0 below -126, clamped above 127. NaN counts as 127, as CUDA's fminf has it."""
    values = np.asarray(x, dtype=F32)
    # -inf would give inf - inf below; its result is replaced by 0 at the end.
    capped = np.maximum(np.fmin(values, F32(127)), F32(-126))
    n = (capped + MAGIC) - MAGIC
    f = capped - n
    p = np.full_like(f, EXP2[0])
    for c in EXP2[1:]:
        p = p * f + c
    return np.where(values < F32(-126), F32(0), p * _power_of_two(n.astype(np.int32)))


def exp(x: npt.ArrayLike) -> Float:
    """e^x = exp2(x * log2 e)."""
    return exp2(np.asarray(x, dtype=F32) * LOG2_E)


def log(x: npt.ArrayLike) -> Float:
    """Natural logarithm of normal x > 0; nothing is promised for other x."""
    bits = np.asarray(x, dtype=F32).view(np.uint32).astype(np.int64)
    e = (bits >> 23) - 127
    mantissa = (bits & 0x7FFFFF) | 0x3F800000
    upper = mantissa >= SQRT_2_BITS  # m in [sqrt(1/2), sqrt(2)), both as float32
    e = e + upper
    m = (mantissa - (upper.astype(np.int64) << 23)).astype(np.uint32).view(F32)
    f = m - ONE
    z = f * f
    y = np.full_like(f, LOG[0])
    for q in LOG[1:]:
        y = y * f + q
    y = y * f * z
    y = y - F32(0.5) * z
    return (f + y) + e.astype(F32) * LN_2


def sigmoid(x: npt.ArrayLike) -> Float:
    """1 / (1 + exp(-x))."""
    return ONE / (ONE + exp(-np.asarray(x, dtype=F32)))


def swiglu(gate: Float, up: Float) -> Words:
    """Expert activation bf16((g / (1 + exp(-g))) * u)."""
    return to_bf16((gate / (ONE + exp(-gate))) * up)


def sum_of_squares(x: Float) -> Float:
    """Sum of x^2 over the last axis, float32 [..., H] -> [...], in the kernel's order."""
    width = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-width // 1024) * 1024), dtype=F32)
    padded[..., :width] = x * x
    # Partial t has x[4 (t + 256 i) + j]; padding adds zeros, which changes no sum of squares.
    terms = padded.reshape(*x.shape[:-1], -1, 256, 4)
    s = np.zeros((*x.shape[:-1], 256), dtype=F32)
    for i in range(terms.shape[-3]):
        for j in range(4):
            s = s + terms[..., i, :, j]
    s = s.reshape(*x.shape[:-1], 8, 32)
    for step in (16, 8, 4, 2, 1):  # butterfly: lane t takes s[t] + s[t ^ step]
        s = s + s[..., np.arange(32) ^ step]
    total = s[..., 0, 0]
    for group in range(1, 8):
        total = total + s[..., group, 0]
    return total


def rmsnorm(x: Float, gamma: Words, eps: float) -> Words:
    """RMSNorm of rows.

    Args:
        x: float32 [..., H].
        gamma: uint16 [H].
        eps: added to the mean square, as float32.

    Returns:
        uint16 [..., H].
    """
    r = ONE / np.sqrt(sum_of_squares(x) / F32(x.shape[-1]) + F32(eps))
    return to_bf16((x * r[..., None]) * from_bf16(gamma))


def rotary_inv_freq(head_dim: int, theta: float) -> Float:
    """Rotary frequencies, float32 [D / 2]: 1 / theta^(2i / D), rounded as transformers rounds."""
    exponent = np.arange(0, head_dim, 2, dtype=F32) / F32(head_dim)
    # float64 and one rounding: float32 pow differs between libraries by an ulp.
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(F32)
    return ONE / power


def rotary_table(positions: npt.ArrayLike, head_dim: int, theta: float) -> tuple[Float, Float]:
    """Rotary tables.

    Args:
        positions: integers [...], token positions.

    Returns:
        cos and sin, float32 [..., D / 2], of the float32 angle, taken in float64.
    """
    angle = np.asarray(positions).astype(F32)[..., None] * rotary_inv_freq(head_dim, theta)
    wide = angle.astype(np.float64)
    return np.cos(wide).astype(F32), np.sin(wide).astype(F32)


def rotate(x: Float, cos: Float, sin: Float) -> Float:
    """Rotate the pairs (2i, 2i + 1) of float32 [..., D] by tables [..., D / 2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = a * cos - b * sin
    out[..., 1::2] = b * cos + a * sin
    return out


def score_scale(head_dim: int) -> np.float32:
    """The float32 constant log2(e) / sqrt(D) that turns q.k into an exponent of two."""
    return F32(1.4426950408889634 / np.sqrt(head_dim))
