"""Where a number is rounded: the two ways in which the reference model computes.

`Plain(dtype)` rounds where transformers rounds, in float64, float32 or bfloat16. `Contract` rounds
where docs/numerics.md rounds: float32 residual stream, router, scores and logits, bfloat16 in the
listed places. The two classes have the same methods, one for each step of a layer; comparing them
side by side is the shortest description of the difference.

What it does not do: fix the order of sums. Those are torch's, so `Contract` is close to the kernel,
not equal to it; `mkref.plan.interpret` is the one that is equal.

Notation: B batch, T new tokens, S keys, J key/value heads, G query heads per key/value head,
D head dimension, H hidden size, k experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mkref.reference.scalars import rotary_table, score_scale
from mkref.weights.layout import PAGE

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["CHUNK", "MOST_SPLITS", "Contract", "Plain", "Rounding"]

CHUNK = 2 * PAGE  # keys whose exponentials have one maximum, aligned to absolute positions
MOST_SPLITS = 33  # partial results of a query, each of one chunk or of several
MINUS_INF = float("-inf")


class Rounding(Protocol):
    """The steps of a layer that round.

    Attributes:
        out_dtype: type of what `linear` returns and of the residual stream.
    """

    out_dtype: torch.dtype

    def weight(self, w: Tensor) -> Tensor:
        """A weight in the type in which it is multiplied."""

    def residual(self, x: Tensor) -> Tensor:
        """Embeddings as the start of the residual stream."""

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        """RMSNorm of [..., H]."""

    def linear(self, y: Tensor, w: Tensor) -> Tensor:
        """Product of activations [..., K] with a weight [M, K]: [..., M]."""

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin of positions [T]: [T, D / 2]."""

    def heads(self, y: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """q, k or v as it enters attention: [..., T, D], rotated if there are tables."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Attention of q [B, J, G, T, D] over k, v [B, J, S, D] where visible [T, S]."""

    def scores(self, logits: Tensor) -> Tensor:
        """Router scores of the k chosen logits [..., k], before normalisation."""

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU: silu(gate) * up."""


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of [..., T, D] by tables [T, D / 2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


class Plain:
    """Rounds where transformers does, for weights and activations of one type."""

    def __init__(self, config: NorthConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = self.out_dtype = dtype
        # Norms, softmax and the rotation are computed in float32 at least.
        self.wide = torch.promote_types(dtype, torch.float32)

    def weight(self, w: Tensor) -> Tensor:
        """In the model's type."""
        return w.to(self.dtype)

    def residual(self, x: Tensor) -> Tensor:
        """In the model's type."""
        return x.to(self.dtype)

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        """Normalised in float32, rounded, then scaled."""
        wide = x.to(self.wide)
        mean = wide.pow(2).mean(-1, keepdim=True)
        return gamma * (wide * torch.rsqrt(mean + self.config.rms_norm_eps)).to(self.dtype)

    def linear(self, y: Tensor, w: Tensor) -> Tensor:
        """Rounded once."""
        return F.linear(y, w)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """float32 angles; cos and sin rounded to the model's type."""
        dim = self.config.head_dim
        exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        inv_freq = (1.0 / self.config.rope_theta**exponent).to(positions.device)
        # The angle is float32 whatever the type: it is part of the model's definition.
        angle = (positions[:, None].float() * inv_freq).to(self.wide)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def heads(self, y: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """Rotated in float32, rounded once."""
        if tables is None:
            return y
        cos, sin = (table.to(self.wide) for table in tables)
        return _rotate(y.to(self.wide), cos, sin).to(self.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Softmax in float32, its probabilities rounded."""
        scores = (q @ k[:, :, None].mT) * self.config.head_dim**-0.5
        scores = scores.masked_fill(~visible, MINUS_INF)
        return scores.softmax(-1, dtype=self.wide).to(self.dtype) @ v[:, :, None]

    def scores(self, logits: Tensor) -> Tensor:
        """Rounded once."""
        return logits.sigmoid()

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """Rounded after silu and after the product."""
        return F.silu(gate) * up


class Contract:
    """Rounds where docs/numerics.md does."""

    def __init__(self, config: NorthConfig) -> None:
        self.config = config
        self.out_dtype = torch.float32

    def weight(self, w: Tensor) -> Tensor:
        """bfloat16."""
        return w.to(torch.bfloat16)

    def residual(self, x: Tensor) -> Tensor:
        """float32, from bfloat16 embeddings."""
        return x.to(torch.bfloat16).float()

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        """Rounded once, to bfloat16, after gamma."""
        r = 1.0 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return ((x * r) * gamma.float()).to(torch.bfloat16)

    def linear(self, y: Tensor, w: Tensor) -> Tensor:
        """bfloat16 factors, float32 sum, not rounded."""
        # bfloat16 products are exact in float32; F.linear on bfloat16 would round the result.
        return F.linear(y.float(), w.float())

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """float32, the kernel's own tables."""
        tables = rotary_table(positions.cpu().numpy(), self.config.head_dim, self.config.rope_theta)
        cos, sin = (torch.from_numpy(table).to(positions.device) for table in tables)
        return cos, sin

    def heads(self, y: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """Rotated in float32, rounded to bfloat16."""
        return (y if tables is None else _rotate(y, *tables)).to(torch.bfloat16)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Chunks of 128 keys, each with the maximum of its split so far; k starts at a chunk."""
        pad = -k.shape[2] % CHUNK
        k, v = (F.pad(t.float(), (0, 0, 0, pad))[:, :, None] for t in (k, v))
        visible = F.pad(visible, (0, pad), value=False)
        scores = (q.float() @ k.mT) * float(score_scale(self.config.head_dim))
        # [B, J, G, T, chunks, 128]
        scores = scores.masked_fill(~visible, MINUS_INF).unflatten(-1, (-1, CHUNK))
        values = v.unflatten(-2, (-1, CHUNK))  # [B, J, 1, chunks, 128, D]
        m = _running(scores.amax(-1), visible)  # [B, J, G, T, chunks]
        # A chunk of which a query sees no key: subtract 0, so that exp2(-inf) = 0 comes out.
        base = m.masked_fill(m == MINUS_INF, 0.0)
        p = torch.exp2(scores - base[..., None]).to(torch.bfloat16).float()
        total = p.sum(-1)
        # [.., T, chunks, 128] x [.., chunks, 128, D], with chunks in front of T
        out = (p.transpose(-3, -2) @ values).transpose(-3, -2)
        w = torch.exp2(m - m.amax(-1, keepdim=True))
        out = (out * w[..., None]).sum(-2) / (total * w).sum(-1, keepdim=True)
        return out.to(torch.bfloat16)

    def scores(self, logits: Tensor) -> Tensor:
        """float32."""
        return 1.0 / (1.0 + torch.exp(-logits))

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """float32, rounded to bfloat16 at the end."""
        return ((gate / (1.0 + torch.exp(-gate))) * up).to(torch.bfloat16)


def _running(m: Tensor, visible: Tensor) -> Tensor:
    """Maxima of chunks and of those before them in their split.

    Args:
        m: maxima of the chunks [B, J, G, T, chunks].
        visible: which keys each query sees [T, chunks * 128].
    """
    seen = visible.unflatten(-1, (-1, CHUNK)).any(-1)  # [T, chunks]
    n_chunks = seen.sum(-1, keepdim=True)
    if int(n_chunks.max()) <= MOST_SPLITS:
        return m
    number = torch.arange(seen.shape[1], device=m.device) - seen.int().argmax(-1, keepdim=True)
    begins = torch.arange(MOST_SPLITS, device=m.device) * n_chunks // MOST_SPLITS
    begin = (number[..., None] == begins[:, None]).any(-1) | (n_chunks <= MOST_SPLITS)
    chunks = [m[..., 0]]
    for c in range(1, m.shape[-1]):
        chunks.append(torch.where(begin[:, c], m[..., c], torch.maximum(chunks[-1], m[..., c])))
    return torch.stack(chunks, dim=-1)
