"""`nano` in the form that trains fast.

What it does: the mathematics of `Cohere2MoeForCausalLM` for the sizes in `Shape`, with the experts
of a layer as two wide products (all experts are computed, the scores of those not chosen are zero),
and sliding attention over blocks of one window.

What it does not do: caches, sampling, files (`nano_export.py`). It shares no code with
`mkref.reference`, so the tests can compare the two.

Sources: `transformers.models.cohere2_moe`; the balancing loss is that of the Switch Transformer
(Fedus et al. 2021) over scores that are normalised for the loss alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["NanoModel", "Shape", "chosen_mask"]


@dataclass(frozen=True)
class Shape:
    """The sizes; names as in config.json. Layer 0 is dense, full and rotary; the last is full."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    head_dim: int = 32
    intermediate_size: int = 64
    prefix_dense_intermediate_size: int = 384
    num_experts: int = 16
    num_experts_per_tok: int = 4
    sliding_window: int = 256
    max_position_embeddings: int = 2048
    rope_theta: float = 50000.0
    rms_norm_eps: float = 1e-6

    def is_sliding(self, layer: int) -> bool:
        """Whether the layer sees one window only; those layers and layer 0 rotate q and k."""
        return 0 < layer < self.num_hidden_layers - 1

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has one plain SwiGLU instead of experts."""
        return layer == 0

    def uses_rope(self, layer: int) -> bool:
        """Whether q and k are rotated."""
        return self.is_dense(layer) or self.is_sliding(layer)


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] float32 -> same."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Multi-query attention: 8 query heads share one key/value head."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.heads, self.dim = shape.num_attention_heads, shape.head_dim
        self.window = shape.sliding_window if shape.is_sliding(layer) else None
        self.rope = shape.uses_rope(layer)
        width = self.heads * self.dim
        self.qkv = nn.Linear(shape.hidden_size, width + 2 * self.dim, bias=False)
        self.o = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """y [B, S, H] -> [B, S, H]; cos, sin [S, D/2] float32."""
        b, s, _ = y.shape
        q, k, v = self.qkv(y).split([self.heads * self.dim, self.dim, self.dim], dim=-1)
        q = q.view(b, s, self.heads, self.dim)
        if self.rope:
            q = _rotate(q, cos[:, None], sin[:, None])
            k = _rotate(k, cos, sin)
        if self.window is None or s <= self.window:
            # [B, heads, S, D]; the one key/value head is seen by all heads without a copy
            q = q.transpose(1, 2)
            k = k[:, None].expand(-1, self.heads, -1, -1)
            v = v[:, None].expand(-1, self.heads, -1, -1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            out = self._windowed(q, k, v)
        return self.o(out.reshape(b, s, -1))

    def _windowed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Blocks of one window: a query sees its own block and the one before, under a band."""
        assert self.window is not None
        b, s, heads, dim = q.shape
        w = self.window
        pad = -s % w  # padded keys lie in the future of every real query
        if pad:
            q, k, v = (F.pad(t, [0, 0] * (t.dim() - 2) + [0, pad]) for t in (q, k, v))
        n = (s + pad) // w
        q = q.view(b, n, w, heads, dim).transpose(2, 3).reshape(b, n, heads * w, dim)
        k, v = (_with_previous(t.view(b, n, w, dim)) for t in (k, v))  # [B, n, 2w, D]
        i = torch.arange(w, device=q.device)[:, None]
        j = torch.arange(2 * w, device=q.device)
        band = (j > i) & (j <= i + w)  # exactly w keys, the query's own included
        block = torch.arange(n, device=q.device)[:, None, None]
        band = band & ((block > 0) | (j >= w))  # [n, w, 2w]: nothing comes before block 0
        scores = (q @ k.transpose(-1, -2)).float() * dim**-0.5
        scores = scores.view(b, n, heads, w, 2 * w).masked_fill(~band[None, :, None], -torch.inf)
        probs = scores.softmax(-1).to(v.dtype).view(b, n, heads * w, 2 * w)
        out = (probs @ v).view(b, n, heads, w, dim).transpose(2, 3)
        return out.reshape(b, s + pad, heads, dim)[:, :s]


class Experts(nn.Module):
    """SwiGLU of `count` experts side by side; one expert without a router is the dense layer."""

    def __init__(self, hidden: int, width: int, count: int, chosen: int) -> None:
        super().__init__()
        self.count, self.width, self.chosen = count, width, chosen
        # rows: all gates (expert 0, 1, ...), then all ups in the same order
        self.gate_up = nn.Linear(hidden, 2 * count * width, bias=False)
        self.down = nn.Linear(count * width, hidden, bias=False)
        self.router = nn.Linear(hidden, count, bias=False) if count > 1 else None

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """y [B, S, H] float32 -> output [B, S, H], router logits [B, S, E] float32 or None."""
        gate, up = self.gate_up(y).chunk(2, dim=-1)
        hidden = F.silu(gate) * up
        if self.router is None:
            return self.down(hidden), None
        with torch.autocast(y.device.type, enabled=False):  # near ties must not hang on rounding
            logits = F.linear(y, self.router.weight)
        scores = logits.sigmoid() * chosen_mask(logits, self.chosen)
        hidden = hidden.unflatten(-1, (self.count, self.width)) * scores[..., None].to(hidden.dtype)
        return self.down(hidden.flatten(-2)), logits


class Layer(nn.Module):
    """One parallel block: x + attention(norm x) + experts(norm x)."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        dense = shape.is_dense(layer)
        width = shape.prefix_dense_intermediate_size if dense else shape.intermediate_size
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.attention = Attention(shape, layer)
        self.experts = Experts(
            shape.hidden_size, width, 1 if dense else shape.num_experts, shape.num_experts_per_tok
        )


class NanoModel(nn.Module):
    """The whole model. `dropout` is used in training mode only."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.embedding = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size))
        self.layers = nn.ModuleList(Layer(shape, n) for n in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        exponent = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        inv_freq = shape.rope_theta**-exponent
        angle = torch.arange(shape.max_position_embeddings).float()[:, None] * inv_freq
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def initialise(self, seed: int) -> None:
        """Draws every matrix from N(0, 0.02); those that write to the residual stream smaller."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            small = name.endswith(("o.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * self.shape.num_hidden_layers) if small else 0.02
            p.data.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, S] int64 -> normed hidden [B, S, H] float32, router logits a sparse layer."""
        s = tokens.shape[1]
        cos, sin = self.cos[:s], self.sin[:s]
        x = F.dropout(self.embed(tokens).float(), self.dropout, self.training)
        routed: list[Tensor] = []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            y = layer.norm(x)
            mixed, logits = layer.experts(y)
            branch = layer.attention(y, cos, sin) + mixed
            x = x + F.dropout(branch.float(), self.dropout, self.training)
            if logits is not None:
                routed.append(logits)
        return self.norm(x), routed

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> [B, S, H]. In training a product with one-hot rows: the backward pass
        is then a product too, fast and in a fixed order, where a scatter would be neither."""
        if not self.training:
            return F.embedding(tokens, self.embedding)
        ids = torch.arange(self.shape.vocab_size, device=tokens.device)
        return (tokens[..., None] == ids).to(self.embedding.dtype) @ self.embedding

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V]; the head is the embedding, logit_scale is 1."""
        return F.linear(hidden, self.embedding)

    def losses(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean cross entropy in nats, balancing loss, mean square router logit, and the use of the
        busiest expert of any layer relative to even use (1 = even)."""
        hidden, routed = self(tokens)
        logits = self.logits(hidden).float().flatten(0, 1)
        entropy = F.cross_entropy(logits, targets.flatten())
        balance, square, busiest = (entropy.new_zeros(()) for _ in range(3))
        for r in routed:
            scores = r.sigmoid()
            share = (scores / scores.sum(-1, keepdim=True)).flatten(0, 1).mean(0)
            used = chosen_mask(r, self.shape.num_experts_per_tok).flatten(0, 1).mean(0)
            used = used * self.shape.num_experts / self.shape.num_experts_per_tok
            balance = balance + (used * share).sum() / len(routed)
            square = square + r.square().mean() / len(routed)
            busiest = torch.maximum(busiest, used.max())
        return entropy, balance, square, busiest


def chosen_mask(logits: Tensor, chosen: int) -> Tensor:
    """1.0 for the `chosen` largest of the last axis (lower id first on a tie), else 0.0.

    Counts, for each expert, how many come before it: 256 comparisons beat a sort of 16 numbers.
    """
    with torch.no_grad():
        mine, other = logits[..., :, None], logits[..., None, :]
        n = logits.shape[-1]
        earlier = torch.ones(n, n, dtype=torch.bool, device=logits.device).tril(-1)
        before = (other > mine) | ((other == mine) & earlier)
        return (before.sum(-1) < chosen).float()


def _rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (2i, 2i+1) of the last axis, in float32; cos, sin fit [..., D/2]."""
    a, b = t.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(t.dtype)


def _with_previous(blocks: Tensor) -> Tensor:
    """[B, n, w, D] -> [B, n, 2w, D]: each block after the one before it (zeros before block 0)."""
    return torch.cat((F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks), dim=2)
