"""Keys and values of a chunk: into the kernel's pages, and out of them for what came before.

A page is made of tiles, keys as rows and values transposed (`mkref.weights.tiles`). Tokens of a
chunk are put one by one at their place in it, so a chunk may begin and end anywhere, and what a
page holds of other tokens stays. What came before is read page by page.

What it does not do: choose pages (`mkref.engine.kv`) or check a table (`prefill_table`).

Notation: J key/value heads, D head dimension, T tokens of the chunk, W sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mkref.weights.layout import PAGE, TILE

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.engine.prefill_table import Span

__all__ = ["GATHERED", "LayerPages", "Places", "page_words"]

GATHERED = 256
"""Most pages that are taken out of the pool at a time: 33 MB of North's."""


def page_words(config: NorthConfig) -> int:
    """bfloat16 values of a page of one layer, all heads, keys and values."""
    return 2 * PAGE * config.kv_width


@dataclass(frozen=True)
class Places:
    """A `Span` on the device.

    Attributes:
        span: the numbers that the host needs.
        read: int64, pages of what came before.
        write: int64 [6, n], for each token that has a page: page, tile of 16 tokens, half of the
            tile, and the token's row g, pair t and place p in it.
        kept: int64 [n], which tokens of the chunk have a page; None: all.
    """

    span: Span
    read: Tensor
    write: Tensor
    kept: Tensor | None

    @classmethod
    def of(cls, span: Span, device: torch.device) -> Places:
        """One copy to the device for everything."""
        n = len(span.kept)
        slot = torch.from_numpy(span.slots)
        half, within = slot % TILE // 8, slot % 8
        rows = (torch.from_numpy(span.write), slot // TILE, half, within, within // 2, within % 2)
        parts = (*rows, torch.from_numpy(span.kept), torch.from_numpy(span.read))
        moved = torch.cat(parts).to(device)
        kept = None if n == span.count else moved[6 * n : 7 * n]
        return cls(span, moved[7 * n :], moved[: 6 * n].view(6, n), kept)


class LayerPages:
    """The pages of one layer.

    Args:
        config: geometry.
        pool: bfloat16 [tiles of the layer, 256], the kernel's own.
    """

    def __init__(self, config: NorthConfig, pool: Tensor) -> None:
        self.heads, self.dim = config.num_key_value_heads, config.head_dim
        self.pages = pool.view(-1, page_words(config))

    def _halves(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Axes of pages: keys [page, j, key tile, dim tile, g, t, kh, rh, p], and values with key
        and dim tiles exchanged; of keys g and rh are the token, of values t, kh and p.
        """
        whole = pages.view(len(pages), self.heads, 2, -1, 8, 4, 2, 2, 2)
        tiles = (4, self.dim // TILE)
        return whole[:, :, 0].unflatten(2, tiles), whole[:, :, 1].unflatten(2, tiles[::-1])

    def write(self, places: Places, k: Tensor, v: Tensor) -> None:
        """Put keys and values [T, J, D] of the chunk where they belong; two kernels."""
        if places.kept is not None:
            k, v = k[places.kept], v[places.kept]
        keys, values = self._halves(self.pages)
        page, tile, half, g, t, p = places.write
        # k: [n, j, dim tile, kh, t, p] -> [n, j, dim tile, t, kh, p]
        parts = k.view(len(k), self.heads, -1, 2, 4, 2).transpose(3, 4)
        keys[page, :, tile, :, g, :, :, half] = parts
        # v: [n, j, dim tile, rh, g] -> [n, j, dim tile, g, rh]
        parts = v.view(len(v), self.heads, -1, 2, 8).transpose(3, 4)
        values[page, :, :, tile, :, t, half, :, p] = parts

    def read(self, places: Places, k: Tensor, v: Tensor, gathered: Tensor) -> None:
        """Fill k and v [tokens, J, D] with what the pages before the chunk hold.

        Args:
            places: of the chunk.
            k, v: room for whole pages.
            gathered: bfloat16 [GATHERED, page_words], overwritten.
        """
        for begin in range(0, len(places.read), GATHERED):
            numbers = places.read[begin : begin + GATHERED]
            n = len(numbers)
            pages = gathered[:n]
            torch.index_select(self.pages, 0, numbers, out=pages)
            keys, values = self._halves(pages)
            tokens = slice(begin * PAGE, (begin + n) * PAGE)
            # -> [page, key tile, rh, g, j, dim tile, kh, t], in pairs of bfloat16
            target = k[tokens].view(torch.int32).view(n, 4, 2, 8, self.heads, -1, 2, 4)
            pairs = keys.view(torch.int32).squeeze(-1)
            target.copy_(pairs.permute(0, 2, 7, 4, 1, 3, 6, 5))
            # -> [page, key tile, kh, t, p, j, dim tile, rh, g]
            target = v[tokens].view(n, 4, 2, 4, 2, self.heads, -1, 2, 8)
            target.copy_(values.permute(0, 3, 6, 5, 8, 1, 2, 7, 4))
