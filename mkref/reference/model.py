"""The model in plain PyTorch, written to be read and to be compared with.

One class, one method per part of a layer. Weights are a mapping from Hugging Face names to tensors
(per-expert names); nothing is copied or converted ahead of time, so the mapping may make tensors
when they are asked for, for instance unpack them from the kernel's layout on a GPU, and only the
experts that some token chose are ever asked for.

What it does not do: run fast, batch sequences of different lengths (give each its own cache), or
drop keys behind the sliding window (it masks them).

Sources: transformers `models/cohere2_moe/modeling_cohere2_moe.py` (5.24), which it equals within
1e-5 in float32; docs/numerics.md for `numerics="contract"`.

Notation: B batch, T new tokens, S keys, J key/value heads, G query heads per key/value head,
D head dimension, H hidden size, E experts, k experts per token, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mkref.reference.rounding import CHUNK, Contract, Plain, Rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from mkref.config import NorthConfig

__all__ = ["KVCache", "Reference"]

QUERY_BLOCK = 256  # queries that attend at a time: bounds the scores held in memory


@dataclass
class KVCache:
    """Keys and values of the tokens so far; `Reference.forward` appends to it.

    Attributes:
        length: tokens held.
        keys, values: per layer, [B, J, length, D].
    """

    length: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, J, T, D] to one layer and return all of its keys and values."""
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], k], dim=2)
            self.values[layer] = torch.cat([self.values[layer], v], dim=2)
        return self.keys[layer], self.values[layer]


class Reference:
    """A Cohere2Moe model.

    Args:
        config: its geometry.
        weights: Hugging Face name -> tensor, all on one device.
        dtype: float32, float64 or bfloat16; ignored by `numerics="contract"`.
        numerics: "plain" rounds where transformers does, "contract" where docs/numerics.md does.
        probe: called with a name such as "layers.3.q" and a tensor, for whoever wants to look.
    """

    def __init__(
        self,
        config: NorthConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        numerics: Literal["plain", "contract"] = "plain",
        probe: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        if numerics not in ("plain", "contract"):
            raise ValueError(f'numerics is {numerics!r}, must be "plain" or "contract"')
        self.config = config
        self.weights = weights
        self.rounding: Rounding = (
            Contract(config) if numerics == "contract" else Plain(config, dtype)
        )
        self.probe = probe or (lambda name, tensor: None)
        # Used at both ends of the model, and large: ask for it once.
        self.embedding = weights["model.embed_tokens.weight"]

    def weight(self, name: str) -> Tensor:
        """The weight called `name`, without the common ending, ready for a product."""
        return self.rounding.weight(self.weights[f"model.{name}.weight"])

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Logits of new tokens.

        Args:
            tokens: int64 [B, T] or [T].
            cache: tokens that came before; extended in place. None starts afresh and keeps nothing.
            last_only: logits of the last token only (of T, in the result, remains 1).

        Returns:
            Logits [B, T, V] (or [T, V]), float32 (float64 if that is the type).
        """
        if tokens.ndim == 1:
            return self.forward(tokens[None], cache, last_only=last_only)[0]
        cache = KVCache() if cache is None else cache
        start = cache.length
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        tables = self.rounding.tables(positions)
        x = self.rounding.residual(F.embedding(tokens, self.embedding))
        for layer in range(self.config.num_hidden_layers):
            y = self.rounding.norm(x, self.weight(f"layers.{layer}.input_layernorm"))
            x = x + self.attention(layer, y, positions, tables, cache)
            x = x + self.mlp(layer, y)  # parallel block: both read the same norm
            self.probe(f"layers.{layer}.x", x)
        cache.length += tokens.shape[1]
        x = x[:, -1:] if last_only else x
        y = self.rounding.norm(x, self.weight("norm"))
        logits = self.rounding.linear(y, self.rounding.weight(self.embedding))
        logits = logits * self.config.logit_scale
        return logits if logits.dtype == torch.float64 else logits.float()

    __call__ = forward

    def next_logits(self, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Logits of the token after each sequence, all of one length; in and out without torch.

        Returns:
            float32 [B, V].
        """
        logits = self.forward(torch.tensor(rows), last_only=True)
        return np.asarray(logits[:, -1].float().cpu().numpy())

    def attention(
        self,
        layer: int,
        y: Tensor,
        positions: Tensor,
        tables: tuple[Tensor, Tensor],
        cache: KVCache,
    ) -> Tensor:
        """Attention block of one layer on normalised activations [B, T, H]: [B, T, H]."""
        config, rounding = self.config, self.rounding
        prefix = f"layers.{layer}.self_attn."
        turn = tables if config.uses_rope(layer) else None

        def heads(name: str, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
            # [B, T, heads * D] -> [B, heads, T, D]
            flat = rounding.linear(y, self.weight(prefix + name))
            split = flat.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            out = rounding.heads(split, rotation)
            self.probe(f"layers.{layer}.{name[0]}", out)
            return out

        q = heads("q_proj", turn).unflatten(1, (config.num_key_value_heads, -1))  # [B, J, G, T, D]
        k, v = cache.append(layer, heads("k_proj", turn), heads("v_proj", None))
        blocks = []
        for first in range(0, len(positions), QUERY_BLOCK):
            at = positions[first : first + QUERY_BLOCK]
            low, high = 0, int(at[-1]) + 1
            if config.is_sliding(layer):
                # Keys that no query of the block sees are left out, whole chunks at a time.
                low = max(0, int(at[0]) + 1 - config.sliding_window) // CHUNK * CHUNK
            keys = torch.arange(low, high, device=at.device)
            visible = keys <= at[:, None]
            if config.is_sliding(layer):
                visible &= keys > at[:, None] - config.sliding_window  # the token itself counts
            block = q[:, :, :, first : first + QUERY_BLOCK]
            blocks.append(rounding.attend(block, k[:, :, low:high], v[:, :, low:high], visible))
        # [B, J, G, T, D] -> [B, T, J * G * D]
        out = torch.cat(blocks, dim=3).flatten(1, 2).transpose(1, 2).flatten(2)
        self.probe(f"layers.{layer}.attention", out)
        return rounding.linear(out, self.weight(prefix + "o_proj"))

    def mlp(self, layer: int, y: Tensor) -> Tensor:
        """Dense MLP or experts of one layer on normalised activations [B, T, H]: [B, T, H]."""
        prefix = f"layers.{layer}.mlp."
        if self.config.is_dense(layer):
            return self.expert(prefix, y)
        flat = y.flatten(0, 1)
        ids, scores = self.route(layer, flat)
        out = torch.zeros_like(flat, dtype=self.rounding.out_dtype)
        for e in ids.unique().tolist():  # ascending, so every row adds its experts in that order
            row, slot = (ids == e).nonzero(as_tuple=True)
            out[row] += scores[row, slot, None] * self.expert(f"{prefix}experts.{e}.", flat[row])
        return out.view(y.shape)

    def route(self, layer: int, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts [rows, k] in ascending id and their scores, of activations [rows, H]."""
        logits = self.rounding.linear(flat, self.weight(f"layers.{layer}.mlp.gate"))
        self.probe(f"layers.{layer}.router", logits)
        # A stable sort: equal logits, the lower id first.
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        ids = order[:, : self.config.num_experts_per_tok].sort(dim=-1).values
        scores = self.rounding.scores(logits.gather(-1, ids))
        if self.config.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return ids, scores

    def expert(self, prefix: str, y: Tensor) -> Tensor:
        """SwiGLU MLP whose weights are called `prefix`gate_proj, up_proj and down_proj."""
        gate = self.rounding.linear(y, self.weight(prefix + "gate_proj"))
        up = self.rounding.linear(y, self.weight(prefix + "up_proj"))
        h = self.rounding.activation(gate, up)
        return self.rounding.linear(h, self.weight(prefix + "down_proj"))
