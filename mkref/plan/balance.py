"""Bytes that each SM streams, per operation: is the work divided evenly?

What a plan fixes is counted exactly. What the step decides is counted for a stated batch: rows of
equal length, each with experts of its own as long as there are any.

What it does not do: predict time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.runtime import attention_items
from mkref.plan.share import share_half
from mkref.plan.table import Ints, TaskTable
from mkref.plan.task import Flag, Op, Task
from mkref.weights.layout import TILE_WORDS

if TYPE_CHECKING:
    from mkref.plan.build import Plan

__all__ = ["Balance", "balance"]

TILE_BYTES = 2 * TILE_WORDS


@dataclass(frozen=True)
class Balance:
    """Bytes streamed in one step.

    Attributes:
        rows, context: the batch that was assumed; `context` tokens in every row.
        bytes: operation name -> int64 [n_sm]; operations that stream nothing are left out.
    """

    rows: int
    context: int
    bytes: dict[str, Ints]

    def total(self) -> Ints:
        """Bytes of every SM: int64 [n_sm]."""
        return np.sum(list(self.bytes.values()), axis=0)

    def lines(self) -> list[str]:
        """A table: one line per operation, the sum last."""
        out = [
            f"{'operation':<10} {'MB':>9} {'MB per SM: least':>17} {'most':>9} {'most/mean':>10}"
        ]
        for name, per_sm in [*self.bytes.items(), ("all", self.total())]:
            mb = per_sm / 1e6
            ratio = mb.max() / mb.mean() if mb.any() else 1.0
            out.append(
                f"{name:<10} {mb.sum():>9.2f} {mb.min():>17.3f} {mb.max():>9.3f} {ratio:>10.3f}"
            )
        return out


def balance(plan: Plan | TaskTable, *, rows: int = 1, context: int = 1) -> Balance:
    """Count the bytes of a step.

    Args:
        plan: a plan that `verify` accepts.
        rows: active rows, 1 to those that the plan is for.
        context: tokens of every row, the one that is fed included.

    Raises:
        ValueError: rows or context out of range.
    """
    table = plan if isinstance(plan, TaskTable) else TaskTable(plan)
    most = table.plan.rows
    if not 1 <= rows <= most or context < 1:
        raise ValueError(f"balance: {rows} rows of {context} tokens; 1 to {most} rows, 1 token up")
    tiles = _tiles(table, rows, context)
    out = {}
    for op in Op:
        mine = table["op"] == op
        per_sm = np.bincount(table.sm[mine], tiles[mine], minlength=table.plan.n_sm)
        if per_sm.any():
            out[op.name] = per_sm.astype(np.int64) * TILE_BYTES
    return Balance(rows, context, out)


def _tiles(table: TaskTable, rows: int, context: int) -> Ints:
    """Tiles that every record streams."""
    config = table.plan.config
    op, first, count = table["op"], table["first"], table["count"]
    tiles = np.where(np.isin(op, [Op.ROUTER, Op.QKV, Op.O_PROJ, Op.HEAD]), count, 0)
    chosen = min(config.num_experts, rows * config.num_experts_per_tok)
    active = np.where(table["flags"] & Flag.DENSE, 1, chosen)
    tiles = np.where(op == Op.DOWN, count * active, tiles)
    granules = active * table["blocks"]
    for record in np.flatnonzero(op == Op.GATE_UP).tolist():
        shared = (int(n[record]) for n in (granules, table["index"], count, first))
        begin, end = share_half(*shared)
        tiles[record] = end - begin
    tiles *= table["k_tiles"]
    positions = np.full(rows, context - 1)
    n_heads, page_tiles = config.num_key_value_heads, config.head_dim // 2
    pages: dict[tuple[int, int, int], int] = {}
    for record in np.flatnonzero(op == Op.ATTENTION).tolist():
        key = (int(table["window"][record]), int(first[record]), int(count[record]))
        if key not in pages:
            window, slot, n_slots = key
            task = Task(Op.ATTENTION, 0, slot, n_slots)
            items = attention_items(positions, window, n_heads, task)
            pages[key] = int((items.last_page - items.first_page + 1).sum())
        tiles[record] = pages[key] * page_tiles
    return tiles
