"""The interpreter's memory: one NumPy array per buffer, and weights unpacked on demand.

What it does not do: interpret anything; check shapes (`mkref.plan.buffers` states them).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mkref.plan.buffers import buffer_table
from mkref.plan.products import Matrix
from mkref.reference.scalars import Words, rotary_table

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["A_ORDER", "B_ORDER", "Buffers", "UnpackedWeights", "allocate"]

Buffers = dict[str, npt.NDArray[Any]]
"""Buffer name to array, with the types and shapes of `mkref.plan.buffers`."""

_K = np.arange(16)
_ROW = _K[:, None]
B_ORDER = (_K & 7) // 2 * 4 + (_K & 1) + _K // 8 * 2
"""Where value k of a 16-deep activation tile sits among its column's 16."""
A_ORDER = ((_ROW & 7) * 4 + (_K & 7) // 2) * 8 + (_ROW // 8 + _K // 8 * 2) * 2 + (_K & 1)
"""Where element (row, k) of a tile sits among its 256; int64 [16, 16]."""


def allocate(plan: Plan, max_context: int) -> Buffers:
    """All buffers of a plan, filled with 0xFF bytes except what a step starts from.

    Counters, status, what the host and the launch tell each other and the count of experts are
    zero; tasks, offsets and rotary tables are filled in. Weights, gammas, the KV cache and the
    step's inputs are the caller's.
    """
    buffers: Buffers = {}
    for name, buffer in buffer_table(plan, max_context).items():
        raw = np.full(buffer.n_bytes, 0xFF, dtype=np.uint8)
        buffers[name] = raw.view(buffer.dtype).reshape(buffer.shape)
    for name in ("counters", "status", "trace", "progress", "control", "active_experts"):
        buffers[name][...] = 0
    buffers["tasks"][...] = plan.words()
    buffers["task_offsets"][...] = plan.offsets()
    tables = rotary_table(np.arange(max_context), plan.config.head_dim, plan.config.rope_theta)
    buffers["rope"][...] = np.stack(tables, axis=-1)
    return buffers


class UnpackedWeights:
    """Matrices cut out of the packed weights, kept for the next step.

    Args:
        tiles: uint16 [total_tiles, 256]; must not change while it is used here.
        budget: bytes of unpacked matrices to keep; the one used longest ago goes first.
    """

    def __init__(self, tiles: Words, budget: int = 1 << 28) -> None:
        self.tiles = tiles
        self.budget = budget
        self.n_bytes = 0
        self.kept: OrderedDict[tuple[int, int, int], Matrix] = OrderedDict()

    def matrix(self, tile: int, n_blocks: int, k_tiles: int) -> Matrix:
        """`n_blocks` row blocks of depth 16 `k_tiles` that start at a tile."""
        key = (tile, n_blocks, k_tiles)
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        matrix = Matrix(self.tiles[tile : tile + n_blocks * k_tiles], k_tiles)
        self.kept[key] = matrix
        self.n_bytes += matrix.n_bytes
        while self.n_bytes > self.budget and len(self.kept) > 1:
            _, old = self.kept.popitem(last=False)
            self.n_bytes -= old.n_bytes
        return matrix
