"""Lesson 16, the oracle: the shared expert, and a whole model that has it, in NumPy and float64.

As boring as possible: no tiles, no rounding, no order of sums, one sequence. Whatever else there is
of the port is compared with it, so it shares nothing with it but the weights.

Source: transformers `models/cohere2_moe/modeling_cohere2_moe.py` (5.24), with `num_shared_experts`
1 and the strategy "sum"; tests/test_lesson_16.py compares the two.

Notation: T tokens, H hidden size, W width of the shared expert, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["model_logits", "shared_expert", "silu"]

Numbers = npt.NDArray[np.float64]


def silu(z: Numbers) -> Numbers:
    """z / (1 + e^-z)."""
    with np.errstate(over="ignore"):  # e^-z may be infinite: then the quotient is 0
        return z / (1.0 + np.exp(-z))


def shared_expert(y: Numbers, gate: Numbers, up: Numbers, down: Numbers) -> Numbers:
    """down (silu(gate y) * (up y)) of every token: [T, H].

    Args:
        y: [T, H], the normed x that the layer's other products read, too.
        gate, up: [W, H].
        down: [H, W].
    """
    return (silu(y @ gate.T) * (y @ up.T)) @ down.T


def model_logits(
    weights: Mapping[str, Any], config: NorthConfig, tokens: Sequence[int], *, shared: bool = True
) -> Numbers:
    """Logits after every token of one sequence, float64 [T, V].

    Args:
        weights: Hugging Face name -> tensor.
        config: geometry.
        tokens: of the sequence, from its beginning.
        shared: with the shared expert; False leaves it out, to see how much it matters.
    """

    def w(name: str) -> Numbers:
        return np.asarray(weights[f"model.{name}.weight"].double())

    def norm(x: Numbers, gamma: str) -> Numbers:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
        return x / scale * w(gamma)

    def expert(y: Numbers, name: str) -> Numbers:
        parts = (w(f"{name}.{part}_proj") for part in ("gate", "up", "down"))
        return shared_expert(y, *parts)

    def mlp(y: Numbers, layer: int) -> Numbers:
        name = f"layers.{layer}.mlp"
        if config.is_dense(layer):
            return expert(y, name)
        logits, out = y @ w(f"{name}.gate").T, np.zeros_like(y)
        for t, row in enumerate(logits):
            for e in np.argsort(-row, kind="stable")[: config.num_experts_per_tok]:
                score = 1 / (1 + np.exp(-row[e]))
                out[t] += score * expert(y[t : t + 1], f"{name}.experts.{e}")[0]
        return out + expert(y, f"{name}.shared_experts") if shared else out

    x = w("embed_tokens")[list(tokens)]
    for layer in range(config.num_hidden_layers):
        y = norm(x, f"layers.{layer}.input_layernorm")
        x = x + _attention(y, layer, config, w) + mlp(y, layer)
    return norm(x, "norm") @ w("embed_tokens").T * config.logit_scale


def _attention(y: Numbers, layer: int, config: NorthConfig, w: Any) -> Numbers:
    """Attention of all tokens of a sequence, with its output projection: [T, H]."""
    at, D, t = f"layers.{layer}.self_attn", config.head_dim, np.arange(len(y))
    q, k, v = ((y @ w(f"{at}.{name}_proj").T).reshape(len(y), -1, D) for name in "qkv")
    if config.uses_rope(layer):
        angle = t[:, None] * config.rope_theta ** (-np.arange(0, D, 2) / D)  # [T, D/2]
        turn = np.exp(1j * angle)[:, None]
        # A pair (2i, 2i+1) is a complex number, and turned by its angle.
        q, k = (((z[..., ::2] + 1j * z[..., 1::2]) * turn) for z in (q, k))
        q, k = (np.stack([z.real, z.imag], axis=-1).reshape(len(y), -1, D) for z in (q, k))
    k, v = (np.repeat(z, config.group_size, axis=1) for z in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(D)
    age = t[:, None] - t
    window = config.sliding_window if config.is_sliding(layer) else len(t)
    scores = np.where((age >= 0) & (age < window), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("hts,shd->thd", p / p.sum(axis=-1, keepdims=True), v)
    return np.asarray(out.reshape(len(y), -1) @ w(f"{at}.o_proj").T)
