"""One chunk of a prompt through all layers, in PyTorch: leaves keys and values in the cache.

The mathematics and the roundings are those of docs/numerics.md as far as torch's products allow:
float32 residual stream, router and rotation, bfloat16 factors. What differs: sums have torch's
order, a GPU rounds the experts' products to bfloat16, and softmax weights stay in float32 on a CPU.

The last layer ends with its keys and values: nobody needs what comes after, as long as the last
token of a prompt is fed to the kernel.

What it does not do: give logits.

Notation: T tokens of the chunk, S tokens whose keys it sees, H hidden size, J key/value heads,
D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from mkref.engine.prefill_moe import Routes, route, swiglu
from mkref.engine.prefill_pages import GATHERED, LayerPages, Places, page_words
from mkref.engine.prefill_products import attend, grouped, product
from mkref.engine.prefill_weights import Operators, b_order, slab_words
from mkref.weights.layout import PAGE, TILE

if TYPE_CHECKING:
    from mkref.config import NorthConfig
    from mkref.plan.build import KvPool

__all__ = ["Layers", "Workspace", "workspace_bytes"]

LIBRARIES = 128 << 20
"""Bytes for cuBLAS, sorting and the rounding of the allocator."""
ROUTE = 40
"""Bytes that a pair of token and expert takes on its way through `prefill_moe.route`."""


@dataclass(frozen=True)
class Workspace:
    """Memory that is made once.

    Attributes:
        slab: bfloat16, one operator.
        keys, values: bfloat16 [tokens, J, D], of one layer, whole pages.
        gathered: bfloat16 [GATHERED, page_words], pages as they are in the pool.
    """

    slab: Tensor
    keys: Tensor
    values: Tensor
    gathered: Tensor

    @classmethod
    def of(cls, config: NorthConfig, max_context: int, device: str) -> Workspace:
        """For sequences of at most `max_context` tokens."""

        def words(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)

        tokens = -(-max_context // PAGE) * PAGE
        heads = (tokens, config.num_key_value_heads, config.head_dim)
        slab, pages = slab_words(config), page_words(config)
        return cls(words(slab), words(*heads), words(*heads), words(GATHERED, pages))


def workspace_bytes(config: NorthConfig, chunk: int, max_context: int) -> int:
    """Most bytes that chunks of `chunk` tokens take on a GPU beside weights and cache.

    >>> from mkref.config import NORTH_MINI_CODE
    >>> workspace_bytes(NORTH_MINI_CODE, 2048, 262144) < 2e9
    True
    """
    hidden, q, kv = config.hidden_size, config.q_width, config.kv_width
    tokens = -(-max_context // PAGE) * PAGE
    fixed = 2 * (slab_words(config) + 2 * tokens * kv + GATHERED * page_words(config))
    # float32 of router, q, k and v beside q; or q, what attention makes of it, and what o does.
    routed = 0 if config.n_sparse_layers == 0 else -(-config.num_experts // TILE) * TILE
    attention = max(4 * (routed + q + 2 * kv) + 2 * q, 6 * q + 4 * hidden)
    feed_forward = 0
    for layer in range(config.num_hidden_layers):
        dense = config.is_dense(layer)
        pairs = 1 if dense else config.num_experts_per_tok
        width, size = config.mlp_width(layer), 4 if dense else 2
        # Rows that go in, gate and up; these (of bfloat16 also in float32) and h; h and rows that
        # come out; those, twice.
        steps = (2 * hidden + 2 * size * width, (10 if dense else 14) * width)
        largest = max(*steps, 2 * width + size * hidden, 2 * size * hidden)
        feed_forward = max(feed_forward, pairs * (largest + ROUTE) + 4 * hidden)
    # The residual stream, its norm in float32 and in B order.
    per_token = 4 * hidden + 6 * hidden + max(attention, feed_forward)
    return fixed + chunk * per_token + LIBRARIES


class Layers:
    """A model over a machine's memory, for the time of one chunk.

    Args:
        operators: its weights.
        pool: where the pages of each layer lie.
        kv: bfloat16 [tiles, 256], the pool.
        rope: float32 [max_context, D / 2, 2], cos and sin.
        space: to work in.
    """

    def __init__(
        self, operators: Operators, pool: KvPool, kv: Tensor, rope: Tensor, space: Workspace
    ) -> None:
        self.config, self.operators, self.space = operators.config, operators, space
        self.rope = torch.view_as_complex(rope)  # [max_context, D / 2]
        self.pages, begin = [], 0
        for layer in range(self.config.num_hidden_layers):
            end = begin + pool.layer_tiles(self.config, layer)
            self.pages.append(LayerPages(self.config, kv[begin:end]))
            begin = end

    def run(self, tokens: Tensor, places: tuple[Places | None, ...]) -> None:
        """Feed int64 [T]; `places` of full and of sliding layers."""
        x = self.operators.embed(tokens)
        last = self.config.num_hidden_layers - 1
        for layer in range(last + 1):
            where = places[int(self.config.is_sliding(layer))]
            assert where is not None, "this kind of layer has a span"
            y = self._norm(x, layer)
            routes, q, k, v = self._project(layer, y, where)
            self.pages[layer].write(where, k[-len(q) :], v[-len(q) :])
            if layer == last:
                return
            window = self.config.sliding_window if self.config.is_sliding(layer) else None
            mixed = attend(q, k, v, window)
            x += product(b_order(mixed.flatten(1)), self.operators.o(layer))
            del q, k, v, mixed
            x += self._dense(layer, y) if routes is None else self._sparse(layer, y, routes)

    def _norm(self, x: Tensor, layer: int) -> Tensor:
        """RMSNorm in float32, rounded once: bfloat16 [T, H] in B order."""
        gamma = self.operators.gammas[layer]
        return b_order(F.rms_norm(x, gamma.shape, gamma, self.config.rms_norm_eps))

    def _project(
        self, layer: int, y: Tensor, where: Places
    ) -> tuple[Routes | None, Tensor, Tensor, Tensor]:
        """Routes of a sparse layer; q [T, heads, D]; k and v [S, J, D] of all tokens that the chunk
        sees, itself included.
        """
        config, span, space = self.config, where.span, self.space
        operator, n_router = self.operators.router_qkv(layer)
        flat = product(y, operator)
        routes = route(config, flat[:, : config.num_experts]) if n_router else None
        heads = flat[:, n_router:].unflatten(1, (-1, config.head_dim))
        n_q, n_kv = config.num_attention_heads, config.num_key_value_heads
        if config.uses_rope(layer):
            # (a + ib)(cos + i sin) turns the pairs (2i, 2i + 1) of q and k.
            pairs = torch.view_as_complex(heads[:, : n_q + n_kv].unflatten(2, (-1, 2)))
            pairs *= self.rope[span.position : span.position + span.count, None]
        self.pages[layer].read(where, space.keys, space.values, space.gathered)
        begin, end = span.position - span.first, span.position - span.first + span.count
        # What the last page before the chunk has behind its tokens is overwritten here.
        space.keys[begin:end] = heads[:, n_q : n_q + n_kv]
        space.values[begin:end] = heads[:, n_q + n_kv :]
        seen = slice(span.low - span.first, end)
        return routes, heads[:, :n_q].to(torch.bfloat16), space.keys[seen], space.values[seen]

    def _dense(self, layer: int, y: Tensor) -> Tensor:
        """The MLP of a dense layer: float32 [T, H]."""
        h = swiglu(product(y, self.operators.gate_up(layer)[0]), None)
        return product(h, self.operators.down(layer)[0])

    def _sparse(self, layer: int, y: Tensor, routes: Routes) -> Tensor:
        """The experts of a sparse layer: float32 [T, H]."""
        # Nothing is kept longer than it is used: these are the largest tensors of all.
        gate_up = grouped(y[routes.tokens], self.operators.gate_up(layer), routes.ends)
        h = swiglu(gate_up, routes.scores)
        del gate_up
        out = grouped(h, self.operators.down(layer), routes.ends)
        del h
        return routes.gather(out)
