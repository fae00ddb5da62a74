"""Synthetic weights of any geometry, made in packed form on the device.

Independent random numbers have no order, so each region of the tile array is filled in place: no
second copy of a model that takes up half of a GPU, and the largest geometry takes seconds.

Scales keep activations sane at any depth. Inputs of a product have unit variance (they come from an
RMSNorm), so a matrix of depth K has standard deviation 1 / sqrt(K) and its outputs unit variance
again. Embeddings have twice 1 / sqrt(H): logits spread by about 2. All branches together add about
half of the embedding's size to the residual stream: as in a trained model, rounding then changes an
output a little, where a stream made of branches alone would turn every near-tie of a router into
another output. The final gamma has random signs; without them the tied head would only ever repeat
the token that came in. Router logits have unit variance, so routing is near uniform.

What it does not do: write text. The numbers depend on seed, geometry and device type (the CPU's
and the GPU's generators differ).

Notation: K depth of a product, L layers, H hidden size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mkref.weights.layout import TILE, n_tiles
from mkref.weights.packed import PackedWeights

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["synthetic_weights"]

EMBEDDING_GAIN = 2.0
BRANCH_SHARE = 0.5
GAMMA_SPREAD = 0.1


def synthetic_weights(
    config: NorthConfig, seed: int = 0, device: str | torch.device = "cpu"
) -> PackedWeights:
    """Random weights.

    Args:
        config: geometry.
        seed: of torch's generator for the device.
        device: where the weights are made and stay.

    Returns:
        Packed weights; rows that padding adds are zero.

    >>> from mkref.config import NorthConfig
    >>> tiny = NorthConfig.from_dict({
    ...     "vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    ...     "head_dim": 32, "intermediate_size": 32, "num_experts": 4, "rms_norm_eps": 1e-6,
    ...     "expert_selection_fn": "sigmoid"})
    >>> weights = synthetic_weights(tiny)
    >>> weights["model.layers.1.mlp.experts.3.up_proj.weight"].shape
    torch.Size([32, 48])
    """
    packed = PackedWeights.empty(config, device)
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    layout, hidden = packed.layout, config.hidden_size

    def fill(tile: int, count: int, std: float) -> None:
        packed.tiles[tile : tile + count].normal_(0.0, std, generator=generator)

    def fill_rows(tile: int, rows: int, std: float) -> None:
        fill(tile, n_tiles(rows, hidden), std)
        if rows % TILE:
            last = packed.tiles[tile + rows // TILE * (hidden // TILE) :][: hidden // TILE]
            # A tile is [g, t, kh, rh, p] with row = 8 rh + g.
            row = torch.arange(8)[:, None] + 8 * torch.arange(2)
            padding = (row >= rows % TILE).to(last.device)[:, None, None, :, None]
            last.view(-1, 8, 4, 2, 2, 2).masked_fill_(padding, 0.0)

    unit = 1 / math.sqrt(hidden)
    branch = BRANCH_SHARE * EMBEDDING_GAIN * unit / math.sqrt(2 * config.num_hidden_layers)
    for i in range(config.num_hidden_layers):
        at, experts = layout.layer(i), layout.n_experts(i)
        if not config.is_dense(i):
            fill_rows(at.router, config.num_experts, unit)
        fill(at.qkv, at.gate_up - at.qkv, unit)
        fill(at.gate_up, at.o - at.gate_up, unit)
        fill(at.o, at.down - at.o, branch / math.sqrt(config.q_width))
        down = experts * layout.down_stride(i)
        fill(at.down, down, branch / math.sqrt(config.mlp_width(i)))
    fill_rows(layout.head, config.vocab_size, EMBEDDING_GAIN * unit)
    packed.gammas.normal_(1.0, GAMMA_SPREAD, generator=generator)
    signs = torch.empty(hidden, device=packed.gammas.device).uniform_(-1, 1, generator=generator)
    packed.gammas[-1] *= signs.sign()
    return packed
