"""The experts of a whole chunk: every token finds its own, every expert is read once.

Token and expert pairs are sorted by expert, so that each expert's rows lie together for one grouped
product, and come back to their token through the inverse of that order. Sorting and gathering have
one result, whatever runs first; nothing is added up by atomics.

What it does not do: unpack weights (`prefill_weights`) or multiply (`prefill_products`).

Notation: T tokens, k experts per token, E experts, I width of an expert, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from mkref.weights.layout import TILE

if TYPE_CHECKING:
    from mkref.config import NorthConfig

__all__ = ["Routes", "route", "swiglu"]


@dataclass(frozen=True)
class Routes:
    """Which token goes to which expert: T k pairs, ordered by expert.

    Attributes:
        tokens: int64 [T k], the token of each pair.
        scores: float32 [T k], the expert's score for it.
        ends: int32 [E], where the pairs of each expert end.
        places: int64 [T, k], where the pairs of each token are, experts in ascending id.
    """

    tokens: Tensor
    scores: Tensor
    ends: Tensor
    places: Tensor

    def gather(self, outputs: Tensor) -> Tensor:
        """Outputs [T k, H] of all pairs, added up for each token: float32 [T, H]."""
        n, k = self.places.shape
        return outputs[self.places.view(-1)].view(n, k, -1).sum(1, dtype=torch.float32)


def route(config: NorthConfig, logits: Tensor) -> Routes:
    """The k largest of the router's logits, float32 [T, E]; of equal ones the lower id."""
    k = config.num_experts_per_tok
    order = logits.sort(dim=1, descending=True, stable=True).indices
    ids = order[:, :k].sort(dim=1).values
    scores = logits.gather(1, ids).sigmoid()
    if config.norm_topk_prob:
        scores = scores / scores.sum(1, keepdim=True)
    sorted_ids, pairs = ids.view(-1).sort(stable=True)
    experts = torch.arange(config.num_experts, device=logits.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    places = torch.empty_like(pairs)
    places[pairs] = torch.arange(len(pairs), device=pairs.device)  # each written once
    return Routes(pairs // k, scores.view(-1)[pairs], ends, places.view(-1, k))


def swiglu(gate_up: Tensor, scores: Tensor | None) -> Tensor:
    """Activations of experts, times the experts' scores: bfloat16 [rows, I] in B order.

    The down projection is linear, so a score may be applied before it; then rows of a token need
    only be added, and the activation is still rounded once.

    Args:
        gate_up: [rows, 2 I]; of 16 values, the first 8 are gates, the others up.
        scores: float32 [rows], or None.
    """
    halves = gate_up.view(len(gate_up), -1, 2, 8)
    gate, up = halves[:, :, 0].float(), halves[:, :, 1]
    # float() of a float32 tensor is the tensor itself, a part of `gate_up`, which is used up.
    gate = F.silu(gate, inplace=True)
    up = up.float() if scores is None else up * scores[:, None, None]
    rows, depth = gate.shape[0], gate.shape[1] * 8
    out = torch.empty(rows, depth, dtype=torch.bfloat16, device=gate.device)
    # As in `b_order`, without a float32 copy in between: [.., kh, (t, p)] -> [.., t, kh, p]
    shape = (rows, depth // TILE, 2, 4, 2)
    target = out.view(rows, depth // TILE, 4, 2, 2).transpose(2, 3)
    torch.mul(gate.reshape(shape), up.reshape(shape), out=target)
    return out
