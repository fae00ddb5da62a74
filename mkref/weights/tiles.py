"""Tiles: matrices, activations and KV pages in the order in which a warp reads them.

A tile is the A operand of `mma.sync.m16n8k16`, 16 x 16 bfloat16 in 512 bytes: lane `l = 4 g + t`
owns 16 contiguous bytes, four registers of two neighbours in k,

    a0 = (row g, k 2t..2t+1)     a1 = (row g + 8, k 2t..2t+1)
    a2 = (row g, k 2t+8..2t+9)   a3 = (row g + 8, k 2t+8..2t+9)

so that one 16-byte shared-memory load per lane, without bank conflicts, feeds one `mma`.

What it does not do: know about a model (`layout` does). NumPy only; bfloat16 values are uint16
words.

Sources: PTX ISA, "Matrix fragments for mma.m16n8k16".

Notation: M rows and K columns of a matrix, D head dimension.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = [
    "PAGE", "TILE", "TILE_WORDS", "Words", "from_b_order", "n_tiles", "pack_kv_page", "pack_tiles",
    "to_b_order", "unpack_kv_page", "unpack_tiles", "write_half",
]  # fmt: skip

Words = npt.NDArray[np.uint16]

TILE = 16  # rows and columns of a tile
TILE_WORDS = TILE * TILE
PAGE = 64  # tokens of a KV page

# Axes of a matrix seen as [row block, rh, g, k tile, kh, t, p] with row = 8 rh + g and
# k = 8 kh + 2 t + p, and the same axes in the order of a packed tile: [.., g, t, kh, rh, p].
_PACK = (0, 3, 2, 5, 4, 1, 6)
_UNPACK = (0, 5, 2, 1, 4, 3, 6)


def n_tiles(rows: int, cols: int) -> int:
    """Tiles of a matrix [rows, cols]; rows are padded, cols must be a multiple of 16."""
    return -(-rows // TILE) * (cols // TILE)


def pack_tiles(matrix: Words) -> Words:
    """Cut a matrix into tiles.

    Args:
        matrix: uint16 [M, K], K a multiple of 16; M is padded with zero rows.

    Returns:
        uint16 [ceil(M / 16) * (K / 16), 256]; tile `b * (K / 16) + kt` holds rows 16 b.. and
        columns 16 kt...

    Raises:
        ValueError: K is not a multiple of 16.
    """
    rows, cols = matrix.shape
    if cols % TILE:
        raise ValueError(f"pack_tiles: {cols} columns, must be a multiple of {TILE}")
    if rows % TILE:
        padding = np.zeros((-rows % TILE, cols), dtype=matrix.dtype)
        matrix = np.concatenate([matrix, padding])
    parts = matrix.reshape(-1, 2, 8, cols // TILE, 2, 4, 2)
    return np.ascontiguousarray(parts.transpose(_PACK)).reshape(-1, TILE_WORDS)


def unpack_tiles(tiles: Words, rows: int, cols: int) -> Words:
    """Inverse of `pack_tiles`: uint16 [rows, cols] from the first `n_tiles(rows, cols)` tiles."""
    count = n_tiles(rows, cols)
    parts = tiles[:count].reshape(-1, cols // TILE, 8, 4, 2, 2, 2)
    matrix = np.ascontiguousarray(parts.transpose(_UNPACK)).reshape(-1, cols)
    return matrix[:rows]


def write_half(tiles: Words, matrix: Words, half: int) -> None:
    """Write the gate (half 0) or up (half 1) matrix into the interleaved tiles of an expert.

    Args:
        tiles: uint16 [I / 8 * (K / 16), 256], written in place; a granule of 16 rows holds gate
            rows 8j..8j+7 and then up rows 8j..8j+7, so that one mma gives both for 8 outputs.
        matrix: uint16 [I, K].
    """
    granules, cols = matrix.shape[0] // 8, matrix.shape[1]
    parts = matrix.reshape(granules, 8, cols // TILE, 2, 4, 2).transpose(0, 2, 1, 4, 3, 5)
    tiles.reshape(granules, cols // TILE, 8, 4, 2, 2, 2)[..., half, :] = parts


def to_b_order(x: Words) -> Words:
    """Activations in the order in which a warp reads them as the B operand.

    Args:
        x: uint16 [n, K], one row per column of the mma (n = 8 in the kernel).

    Returns:
        uint16 [K / 16, n, 16]; within 16 values the order is 0,1,8,9,2,3,10,11,4,5,12,13,6,7,14,15,
        so that lane `l` reads 8 bytes at byte `8 l`.
    """
    n, depth = x.shape
    parts = x.reshape(n, depth // TILE, 2, 4, 2).transpose(1, 0, 3, 2, 4)
    return np.ascontiguousarray(parts).reshape(depth // TILE, n, TILE)


def from_b_order(b: Words) -> Words:
    """Inverse of `to_b_order`: uint16 [n, K] from [K / 16, n, 16]."""
    k_tiles, n, _ = b.shape
    parts = b.reshape(k_tiles, n, 4, 2, 2).transpose(1, 0, 3, 2, 4)
    return np.ascontiguousarray(parts).reshape(n, k_tiles * TILE)


def pack_kv_page(keys: Words, values: Words) -> Words:
    """Tiles of one page: keys as rows, then values transposed so that dimensions are rows.

    Args:
        keys: uint16 [64, D].
        values: uint16 [64, D].

    Returns:
        uint16 [D / 2, 256]: K [4 key tiles][D / 16 dim tiles], V^T [D / 16 dim tiles][4 key tiles].
    """
    return np.concatenate([pack_tiles(keys), pack_tiles(np.ascontiguousarray(values.T))])


def unpack_kv_page(tiles: Words, head_dim: int) -> tuple[Words, Words]:
    """Inverse of `pack_kv_page`: keys and values, uint16 [64, D] each."""
    half = head_dim // 4
    keys = unpack_tiles(tiles[:half], PAGE, head_dim)
    values = unpack_tiles(tiles[half : 2 * half], head_dim, PAGE)
    return keys, np.ascontiguousarray(values.T)
