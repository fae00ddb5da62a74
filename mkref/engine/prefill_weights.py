"""The packed weights as matrices for torch, one operator at a time, in a workspace.

The kernel's tiles lie in the order of an mma fragment, which no matrix product of torch can read,
and the GPU has no room for a second copy of the model. So each operator is unpacked just before it
is used, all its experts in one copy, into a slab that the next operator overwrites.

Columns stay in B order, the order of the kernel's activations: within 16, columns 0, 1, 8, 9, 2, 3,
10, 11, ... A product does not mind as long as its other factor has the same order (`b_order`), and
the copy has an axis less, which is what it costs.

What it does not do: change a weight, or keep one.

Notation: M rows and K columns of a matrix, H hidden size, E experts, I width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mkref.weights.layout import TILE, TILE_WORDS, PackedLayout

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["Operators", "b_order", "slab_words", "unpack"]


def b_order(x: Tensor) -> Tensor:
    """Activations [T, K] of any type as bfloat16 in B order, for a product with an operator."""
    rows, depth = x.shape
    out = torch.empty(rows, depth, dtype=torch.bfloat16, device=x.device)
    # [.., kh, t, p] -> [.., t, kh, p]: k = 8 kh + 2 t + p
    parts = x.view(rows, depth // TILE, 2, 4, 2).transpose(2, 3)
    out.view(rows, depth // TILE, 4, 2, 2).copy_(parts)
    return out


def unpack(tiles: Tensor, cols: int, slab: Tensor) -> Tensor:
    """A packed matrix, its columns in B order.

    Args:
        tiles: bfloat16 [n, 256], whole row blocks.
        cols: K.
        slab: bfloat16, one-dimensional, at least as large; its first part is overwritten.

    Returns:
        bfloat16 [M, K] in the slab, rows that padding adds included; rows of gate and up as they
        are interleaved.
    """
    pairs = tiles.view(torch.int32).view(-1, cols // TILE, 8, 8, 2)  # [block, kt, g, (t, kh), rh]
    out = slab[: tiles.numel()]
    target = out.view(torch.int32).view(-1, 2, 8, cols // TILE, 8)  # [block, rh, g, kt, (t, kh)]
    target.copy_(pairs.permute(0, 4, 2, 1, 3))
    return out.view(-1, cols)


def slab_words(config: NorthConfig) -> int:
    """bfloat16 values of the largest operator of any layer."""
    layout, largest = PackedLayout(config), 0
    for i in range(config.num_hidden_layers):
        at, experts = layout.layer(i), layout.n_experts(i)
        down = experts * layout.down_stride(i)
        begin = at.qkv if config.is_dense(i) else at.router
        largest = max(largest, at.gate_up - begin, at.o - at.gate_up, at.down - at.o, down)
    return largest * TILE_WORDS


class Operators:
    """The operators of a model, unpacked on demand. What a method gives lasts until the next call.

    Args:
        layout: of the tiles.
        tiles: bfloat16 [total_tiles, 256], the kernel's own.
        gammas: bfloat16 [L + 1, H].
        slab: bfloat16 [at least slab_words].
    """

    def __init__(self, layout: PackedLayout, tiles: Tensor, gammas: Tensor, slab: Tensor) -> None:
        self.config = layout.config
        self.layout, self.tiles, self.slab = layout, tiles, slab
        self.gammas = gammas.float()

    def _unpack(self, begin: int, end: int, cols: int) -> Tensor:
        return unpack(self.tiles[begin:end], cols, self.slab)

    def router_qkv(self, layer: int) -> tuple[Tensor, int]:
        """Rows of the router, padding included, of q, k and v; and how many the router has."""
        at, hidden = self.layout.layer(layer), self.config.hidden_size
        begin = at.qkv if self.config.is_dense(layer) else at.router
        return self._unpack(begin, at.gate_up, hidden), (at.qkv - begin) * TILE // hidden * TILE

    def o(self, layer: int) -> Tensor:
        """[H, q_width]."""
        at = self.layout.layer(layer)
        return self._unpack(at.o, at.down, self.config.q_width)

    def gate_up(self, layer: int) -> Tensor:
        """[E, 2 I, H]; of 16 rows, the first 8 are gate, the others up (`prefill_moe.swiglu`)."""
        at, width = self.layout.layer(layer), self.config.mlp_width(layer)
        whole = self._unpack(at.gate_up, at.o, self.config.hidden_size)
        return whole.view(-1, 2 * width, self.config.hidden_size)

    def down(self, layer: int) -> Tensor:
        """[E, H, I]."""
        at, width = self.layout.layer(layer), self.config.mlp_width(layer)
        end = at.down + self.layout.n_experts(layer) * self.layout.down_stride(layer)
        return self._unpack(at.down, end, width).view(-1, self.config.hidden_size, width)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of int64 [T], which are rows of the head: float32 [T, H]."""
        blocks = self.config.hidden_size // TILE
        head = self.tiles[self.layout.head :].view(-1, blocks, 8, 4, 2, 2, 2)
        row = tokens % TILE
        # [block, kt, g, t, kh, rh, p] -> [T, kt, t, kh, p]
        picked = head[tokens // TILE, :, row % 8, :, :, row // 8]
        return picked.transpose(2, 3).reshape(len(tokens), -1).float()
