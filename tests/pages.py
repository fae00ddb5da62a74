"""Queries, and keys and values in shuffled pages, for attention on a desk. No tests here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mkref.plan import Flag, Op, Task
from mkref.plan.interpret_attention import attention, merge
from mkref.reference.scalars import from_bf16, to_bf16
from mkref.weights.layout import pack_kv_page, to_b_order
from tests.desk import POSITIONS, Desk

__all__ = ["ATTENTION", "Cache", "Words", "attend", "set_q"]

Words = npt.NDArray[np.uint16]
ATTENTION = ("kv", "part_o", "part_ml", "attn")
"""Buffers that `attend` writes."""


class Cache:
    """Keys and values of five rows in shuffled pages; everything else in the pool is poison.

    Attributes:
        words: uint16 [2, rows, KV heads, tokens, D], keys and values of every token of every row.
    """

    def __init__(self, desk: Desk, layer: int, garbage: float = np.nan) -> None:
        c = desk.config
        kind = 1 if c.is_sliding(layer) else 0
        self.window = c.sliding_window if kind else 0
        table = desk.buffers["page_table"]
        pages = table.shape[2]
        numbers = np.random.default_rng(3).permutation(40)[: desk.rows * pages]
        table[kind, : desk.rows] = numbers.reshape(desk.rows, pages)
        shape = (2, desk.rows, c.num_key_value_heads, pages * 64, c.head_dim)
        values = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
        self.words = to_bf16(values)
        self.k, self.v = from_bf16(self.words).astype(np.float64)
        new = to_bf16(values[:, np.arange(desk.rows), :, POSITIONS[: desk.rows]]).swapaxes(0, 1)
        desk.buffers["k_new"][: desk.rows], desk.buffers["v_new"][: desk.rows] = new
        # This step's token and all after it are not in the pages yet.
        for row, position in enumerate(POSITIONS[: desk.rows]):
            values[:, row, :, position:] = garbage
        words = to_bf16(values)
        self.kind, self.base, self.table = kind, desk.plan.pool.base(c, layer), table[kind]
        for row in range(desk.rows):
            first = max(0, POSITIONS[row] - self.window + 1) if self.window else 0
            for page in range(first // 64, POSITIONS[row] // 64 + 1):
                for head in range(c.num_key_value_heads):
                    at = slice(page * 64, page * 64 + 64)
                    tiles = pack_kv_page(*words[:, row, head, at])
                    desk.buffers["kv"][self.tiles(desk, row, page, head)] = tiles
            table[kind, row, : first // 64] = -1  # evicted

    def tiles(self, desk: Desk, row: int, page: int, head: int) -> slice:
        """Where a page of one head lies."""
        c = desk.config
        size = c.head_dim // 2
        at = (int(self.table[row, page]) * c.num_key_value_heads + head) * size
        return slice(self.base + at, self.base + at + size)

    def task(self, op: Op, layer: int, slot: int, n_slots: int) -> Task:
        """ATTENTION or MERGE on these pages."""
        flags = Flag.SLIDING if self.kind else 0
        words = {"window": self.window, "kv_tiles": self.base, "flags": flags}
        return Task(op, layer, slot, n_slots, **words)


def attend(desk: Desk, layer: int, cache: Cache, n_slots: int) -> None:
    """ATTENTION and MERGE of a layer on some SMs."""
    for op, do in ((Op.ATTENTION, attention), (Op.MERGE, merge)):
        for slot in range(n_slots):
            do(desk.step, cache.task(op, layer, slot, n_slots))


def set_q(desk: Desk, size: float = 1.0) -> Words:
    """Random q in the kernel's order, and as [row, head, group, D]; no other heads are written."""
    c, n = desk.config, desk.rows
    q = to_bf16(size * desk.normal(n, c.num_key_value_heads, c.group_size, c.head_dim))
    for row in range(n):
        for head in range(c.num_key_value_heads):
            ordered = to_b_order(q[row, head])
            desk.buffers["q"][row, head, :, : c.group_size] = ordered
    return q
