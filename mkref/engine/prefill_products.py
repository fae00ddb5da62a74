"""The three products of a prompt: with a matrix, with one matrix per group of rows, attention.

On a GPU they are cuBLAS, a grouped GEMM and FlashAttention, all in bfloat16 with float32 sums. On a
CPU the same factors are multiplied in float32, attention a block of queries at a time. None of them
uses an atomic: equal inputs give equal bits.

What it does not do: equal the kernel bit for bit, whose sums have an order of their own.

Sources: PyTorch `torch.mm`, `torch._grouped_mm`, `aten::_flash_attention_forward`
(FlashAttention 2: a causal mask is aligned to the last query and key).

Notation: T new tokens, S keys, J key/value heads, D head dimension, E groups, K depth of a product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend", "attend_in_blocks", "grouped", "grouped_in_turn", "product"]

QUERY_BLOCK = 256
SCORES = 1 << 24
"""Most scores of a block of queries that are held at a time."""


def product(y: Tensor, w: Tensor) -> Tensor:
    """bfloat16 [T, K] times bfloat16 [M, K]: float32 [T, M], rounded only as float32."""
    if y.is_cuda:
        return torch.mm(y, w.t(), out_dtype=torch.float32)
    return F.linear(y.float(), w.float())


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows of group `e` times matrix `e`.

    Args:
        x: bfloat16 [rows, K], group after group.
        w: bfloat16 [E, M, K].
        ends: int32 [E], where each group ends; a group may be empty.

    Returns:
        [rows, M]: bfloat16 on a GPU, which keeps its sums in float32; float32 on a CPU.
    """
    if x.is_cuda:
        return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
    return grouped_in_turn(x, w, ends)


def grouped_in_turn(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """The same in float32, one group after another."""
    out = torch.empty(x.shape[0], w.shape[1], dtype=torch.float32, device=x.device)
    begin = 0
    for e, end in enumerate(ends.tolist()):
        if end > begin:
            torch.mm(x[begin:end].float(), w[e].float().t(), out=out[begin:end])
        begin = end
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of the last T tokens of a sequence over its last S.

    Args:
        q: bfloat16 [T, heads, D].
        k, v: bfloat16 [S, J, D]; the last T are those of the queries.
        window: keys that a query sees, its own included; None is all up to its own.

    Returns:
        bfloat16 [T, heads, D].
    """
    if window is not None and window >= len(k):
        window = None
    if not (q.is_cuda and torch.backends.cuda.is_flash_attention_available()):
        return attend_in_blocks(q, k, v, window)
    flash = torch.ops.aten._flash_attention_forward.default
    out: Tensor = flash(
        q[None], k[None], v[None], None, None, len(q), len(k), 0.0, True, False,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )[0][0]  # fmt: skip
    return out


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The same in float32, with bounded memory."""
    n, before = len(q), len(k) - len(q)
    out = torch.empty_like(q)
    block = max(1, min(QUERY_BLOCK, SCORES // (q.shape[1] * len(k))))
    for begin in range(0, n, block):
        end = min(n, begin + block)
        # Keys that no query of the block sees are left out.
        low = 0 if window is None else max(0, before + begin + 1 - window)
        at = torch.arange(before + begin, before + end, device=q.device)[:, None]
        keys = torch.arange(low, before + end, device=q.device)
        visible = keys <= at
        if window is not None:
            visible &= keys > at - window
        # [tokens, heads, D] -> [1, heads, tokens, D]
        high = before + end
        part = [t.float().transpose(0, 1)[None] for t in (q[begin:end], k[low:high], v[low:high])]
        mixed = F.scaled_dot_product_attention(
            part[0], part[1], part[2], attn_mask=visible, enable_gqa=True
        )
        out[begin:end] = mixed[0].transpose(0, 1)
    return out
