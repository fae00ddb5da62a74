"""Matrix products of the interpreter: the same bits as `mkref.reference.mma`, several times faster.

`mkref.reference.mma` follows the model of one mma in float64 and handles every input. Here the 16
products stay in float32, where the 16-bit significand of a bfloat16 product is exact; the largest
exponent is found with int16 additions; "cut towards zero" is the conversion to int32; and 16 such
integers, each below 4 * 2^25, add up to less than 2^31. That holds for finite operands and largest
exponents from -100 to 120 only: `step` refuses everything else, and the callers go back to
`mkref.reference.mma`.

What it does not do: know about tasks, buffers or the order in which weights are streamed.

Notation: G independent products (warps, or attention items), M rows, n columns, K depth.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mkref.reference import mma
from mkref.reference.mma import OUT_BITS, WARPS, F
from mkref.reference.scalars import Float, Words, from_bf16
from mkref.weights.layout import TILE, TILE_WORDS

__all__ = ["Matrix", "Operand", "Unsafe", "chain", "columns", "step", "tiles_to_rows"]

Exponents = npt.NDArray[np.int16]

ZERO = -512  # exponent of a zero: it never is the largest
NOT_FINITE = 1000  # exponent of infinity and NaN: always out of range
LOWEST, HIGHEST = -100, 120
SUM_MASK = np.uint64((1 << 64) - (1 << (53 - OUT_BITS)))
CHUNK = 1 << 18  # products worked on at a time: what they need stays in the L2 cache


def _exponent_table() -> Exponents:
    """Exponent of every bfloat16 word."""
    words = np.arange(1 << 16)
    field = words >> 7 & 255
    table = np.maximum(field - 127, -126)  # subnormals have the lowest exponent
    table[words & 0x7FFF == 0] = ZERO
    table[field == 255] = NOT_FINITE
    return table.astype(np.int16)


BF16_EXPONENT = _exponent_table()


class Unsafe(Exception):  # noqa: N818 - a signal to the caller, not an error
    """The operands leave the range in which float32 and int32 are exact."""


_memory = threading.local()


def _scratch(shape: tuple[int, ...], dtype: type) -> npt.NDArray[Any]:
    """Uninitialised memory, one piece per type and thread.

    Fresh arrays of this size come from the system page by page, which costs more than the sums.
    """
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    piece = getattr(_memory, dtype.__name__, None)
    if piece is None or piece.nbytes < n_bytes:
        piece = np.empty(n_bytes, dtype=np.uint8)
        setattr(_memory, dtype.__name__, piece)
    return piece[:n_bytes].view(dtype).reshape(shape)


@dataclass(frozen=True)
class Operand:
    """One side of products: values and their exponents.

    Attributes:
        values: float32, any shape.
        exponents: int16, the same shape.
    """

    values: Float
    exponents: Exponents

    @classmethod
    def of(cls, words: Words) -> Operand:
        """From bfloat16 words."""
        return cls(from_bf16(words), BF16_EXPONENT[words])

    def __getitem__(self, index: Any) -> Operand:
        return Operand(self.values[index], self.exponents[index])

    def reshape(self, *shape: int) -> Operand:
        """Both arrays in another shape."""
        return Operand(self.values.reshape(shape), self.exponents.reshape(shape))


def step(c: Float | None, a: Operand, b: Operand) -> Float:
    """One mma of G independent products.

    Args:
        c: float32 [G, n, M]; None stands for zeros.
        a: [G, 16, 1, M].
        b: [G, 16, n, 1].

    Returns:
        float32 [G, n, M].

    Raises:
        Unsafe: the result might not be exact.
    """
    shape = np.broadcast_shapes(a.values.shape, b.values.shape)
    exponents = np.add(a.exponents, b.exponents, out=_scratch(shape, np.int16))
    largest = np.maximum.reduce(exponents, axis=1)
    if c is not None:
        fields = (c.view(np.uint32) >> np.uint32(23)) & np.uint32(255)
        own = fields.astype(np.int16) - np.int16(127)  # -127 if subnormal: below LOWEST anyway
        own[c == 0] = ZERO
        np.maximum(largest, own, out=largest)
    # Nothing but zeros: any exponent will do.
    largest[largest < ZERO // 2] = 0
    if largest.max(initial=0) > HIGHEST or largest.min(initial=0) < LOWEST:
        raise Unsafe
    e = largest.astype(np.int32)
    scale = ((127 + F - e) << 23).view(np.float32)  # 2^(F - e)
    unit = ((127 - F + e) << 23).view(np.float32)
    terms = np.multiply(a.values, b.values, out=_scratch(shape, np.float32))
    terms *= scale[:, None]
    whole = _scratch(shape, np.int32)
    np.copyto(whole, terms, casting="unsafe")
    total = np.add.reduce(whole, axis=1, dtype=np.int32).astype(np.float64)
    if c is not None:
        total += np.trunc(c * scale)
    cut = (total.view(np.uint64) & SUM_MASK).view(np.float64)
    return (cut * unit).astype(np.float32)


def chain(c: Float, a: Words, b: Words) -> Float:
    """`c <- mma(c, A, B)` over K / 16 tiles, ascending, for G products.

    Args:
        c: float32 [G, n, M].
        a: uint16 [G, K, M], a row block transposed.
        b: uint16 [G, K, n].

    Returns:
        float32 [G, n, M].
    """
    products, _, rows = a.shape
    group = max(1, CHUNK // (TILE * rows * b.shape[2]))
    out = np.empty_like(c)
    for first in range(0, products, group):
        part = slice(first, first + group)
        out[part] = _chain(c[part], a[part], b[part])
    return out


def _chain(c: Float, a: Words, b: Words) -> Float:
    left, right = Operand.of(a[:, :, None, :]), Operand.of(b[:, :, :, None])
    try:
        out = c
        for k in range(0, a.shape[1], TILE):
            out = step(out, left[:, k : k + TILE], right[:, k : k + TILE])
        return out
    except Unsafe:
        # mma.chain has [M, K] x [K, n] and c as [M, n].
        wide = mma.chain(c.swapaxes(1, 2), a.swapaxes(1, 2), b)
        return np.ascontiguousarray(wide.swapaxes(1, 2))


def tiles_to_rows(tiles: Words, k_tiles: int) -> Words:
    """Packed tiles of a matrix [M, K], transposed: uint16 [K, M].

    Args:
        tiles: uint16 [row blocks * k_tiles, 256].
        k_tiles: K / 16.
    """
    # [block, kt, g, t, kh, rh, p] with row = 8 rh + g and k = 8 kh + 2 t + p
    parts = tiles.reshape(-1, k_tiles, 8, 4, 2, 2, 2).transpose(1, 4, 3, 6, 0, 5, 2)
    return np.ascontiguousarray(parts).reshape(k_tiles * TILE, -1)


def columns(x: Words) -> Operand:
    """Activations uint16 [n, K] as the operand that `Matrix.chains` takes: [K / 16, 16, n, 1]."""
    transposed = np.ascontiguousarray(x.T).reshape(-1, TILE, x.shape[0], 1)
    return Operand.of(transposed)


class Matrix:
    """A packed matrix, unpacked once for many products.

    Args:
        tiles: uint16 [row blocks * k_tiles, 256]; kept, not copied.
        k_tiles: K / 16.
    """

    def __init__(self, tiles: Words, k_tiles: int) -> None:
        self.tiles = tiles
        self.k_tiles = k_tiles
        words = tiles_to_rows(tiles, k_tiles)
        # [K / 16, 16, 1, M]
        self.operand = Operand.of(words).reshape(k_tiles, TILE, 1, words.shape[1])

    @property
    def n_bytes(self) -> int:
        """Memory of the unpacked form."""
        return self.operand.values.nbytes + self.operand.exponents.nbytes

    def chains(self, x: Operand, first: int = 0, n_blocks: int | None = None) -> Float:
        """The eight warps' partial sums of the product with activations.

        Args:
            x: from `columns`, [K / 16, 16, n, 1].
            first: first row block.
            n_blocks: row blocks; None is all that follow.

        Returns:
            float32 [8, n, 16 n_blocks]; warp w has the tiles w, w + 8, w + 16, ...
        """
        all_blocks = self.operand.values.shape[-1] // TILE
        n_blocks = all_blocks - first if n_blocks is None else n_blocks
        n = x.values.shape[2]
        out = np.zeros((WARPS, n, n_blocks * TILE), dtype=np.float32)
        rows = max(TILE, CHUNK // (WARPS * TILE * n) // TILE * TILE)
        for at in range(0, n_blocks * TILE, rows):
            part = slice(at, min(at + rows, n_blocks * TILE))
            from_row, to_row = first * TILE + part.start, first * TILE + part.stop
            try:
                out[:, :, part] = self._fast(x, slice(from_row, to_row))
            except Unsafe:
                tiles = self.tiles.reshape(-1, self.k_tiles, TILE_WORDS)
                blocks = tiles[from_row // TILE : to_row // TILE].reshape(-1, TILE_WORDS)
                out[:, :, part] = mma.warp_chains(blocks, _natural(x))
        return out

    def _fast(self, x: Operand, rows: slice) -> Float:
        a = self.operand[..., rows]
        out = np.zeros((WARPS, x.values.shape[2], rows.stop - rows.start), dtype=np.float32)
        for start in range(0, self.k_tiles, WARPS):
            stop = min(start + WARPS, self.k_tiles)
            c = out[: stop - start] if start else None
            out[: stop - start] = step(c, a[start:stop], x[start:stop])
        return out

    def project(self, x: Operand, first: int = 0, n_blocks: int | None = None) -> Float:
        """The product: the warps' partial sums added in order, float32 [n, 16 n_blocks]."""
        return mma.sum_warps(self.chains(x, first, n_blocks))


def _natural(x: Operand) -> Words:
    """Inverse of `columns`: uint16 [n, K]."""
    words = (x.values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.ascontiguousarray(words.reshape(-1, words.shape[2]).T)
