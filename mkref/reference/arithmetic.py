"""The kernel's arithmetic in NumPy, one place to import it from.

`scalars` (rounding, exp2, log, RMSNorm, rotary), `mma` (the tensor core's product) and `sampling`
(top-k, Philox, Gumbel) follow docs/numerics.md bit for bit; this module only gathers them.
"""

from __future__ import annotations

from mkref.reference.mma import OUT_BITS, WARPS, F, chain, mma, project, sum_warps, warp_chains
from mkref.reference.sampling import gumbel, order_key, philox, router_scores, sample, top_k
from mkref.reference.scalars import (
    exp,
    exp2,
    from_bf16,
    log,
    rmsnorm,
    rotary_inv_freq,
    rotary_table,
    rotate,
    score_scale,
    sigmoid,
    sum_of_squares,
    swiglu,
    to_bf16,
)

__all__ = [
    "OUT_BITS",
    "WARPS",
    "F",
    "chain",
    "exp",
    "exp2",
    "from_bf16",
    "gumbel",
    "log",
    "mma",
    "order_key",
    "philox",
    "project",
    "rmsnorm",
    "rotary_inv_freq",
    "rotary_table",
    "rotate",
    "router_scores",
    "sample",
    "score_scale",
    "sigmoid",
    "sum_of_squares",
    "sum_warps",
    "swiglu",
    "to_bf16",
    "top_k",
    "warp_chains",
]
