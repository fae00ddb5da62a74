"""What a plan asks of its SMs: per operation tasks, bytes to stream, counters.

Bytes are those of weights and KV pages that a loader copies in one step. Three operations depend on
the run: experts on the routing, attention on the context. The table states what it assumes.

What it does not do: know times (`mkref trace` does), or write anything.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mkref.config import NorthConfig
from mkref.plan.build import CHUNK_PAGES, PAGE, Plan
from mkref.plan.share import share
from mkref.plan.task import NO_COUNTER, Flag, Op, Task

__all__ = ["Assumed", "OpRow", "format_rows", "op_rows", "streamed_bytes"]

TILE_BYTES = 512


@dataclass(frozen=True)
class Assumed:
    """A step's load: rows of the batch, tokens that each row has, distinct experts per layer."""

    rows: int
    context: int
    experts: int

    @classmethod
    def of(cls, config: NorthConfig, rows: int, context: int) -> Assumed:
        """Uniform routing: the expected number of experts that `rows` tokens touch, rounded."""
        experts = round(config.expected_distinct_experts(rows)) if config.n_sparse_layers else 0
        return cls(rows, context, experts)


@dataclass(frozen=True)
class OpRow:
    """One operation of a plan, all layers together.

    Attributes:
        tasks: on all SMs.
        min_bytes, max_bytes: streamed in one step by the SM with the least and with the most.
        counters: distinct counters that it signals.
        arrivals: signals in one step.
    """

    op: str
    tasks: int
    min_bytes: int
    max_bytes: int
    total_bytes: int
    counters: int
    arrivals: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def streamed_bytes(task: Task, plan: Plan, assumed: Assumed) -> int:
    """Bytes that the loader copies for one task."""
    op = Op(task.op)
    experts = 1 if task.flags & Flag.DENSE else assumed.experts
    if op in (Op.ROUTER, Op.QKV, Op.O_PROJ, Op.HEAD):
        tiles = task.count * task.k_tiles
    elif op == Op.DOWN:
        tiles = task.count * task.k_tiles * experts
    elif op == Op.GATE_UP:
        begin, end = share(experts * task.blocks, task.count, task.first)
        tiles = (end - begin) * task.k_tiles
    elif op == Op.ATTENTION:
        pages = _pages(task, plan.config.num_key_value_heads, assumed)
        tiles = pages * plan.config.head_dim // 2
    else:
        tiles = 0
    return tiles * TILE_BYTES


def _pages(task: Task, kv_heads: int, assumed: Assumed) -> int:
    """Pages of one KV head that a slot reads: items (row, chunk, head) are dealt in turn."""
    last = assumed.context - 1
    first = max(0, last - task.window + 1) if task.window else 0
    span = CHUNK_PAGES * PAGE
    in_chunk = [
        min((chunk + 1) * span - 1, last) // PAGE - max(chunk * span, first) // PAGE + 1
        for chunk in range(first // span, last // span + 1)
    ]
    items = [pages for _ in range(assumed.rows) for pages in in_chunk for _ in range(kv_heads)]
    return sum(items[task.first :: task.count])


def op_rows(plan: Plan, assumed: Assumed) -> list[OpRow]:
    """One row per operation, in the order of a step."""
    rows = []
    for op in Op:
        per_sm = [[t for t in tasks if t.op == op] for tasks in plan.tasks]
        loads = [sum(streamed_bytes(t, plan, assumed) for t in tasks) for tasks in per_sm]
        signals = [t.signal for tasks in per_sm for t in tasks if t.signal != NO_COUNTER]
        rows.append(
            OpRow(
                op.name,
                sum(map(len, per_sm)),
                min(loads),
                max(loads),
                sum(loads),
                len(set(signals)),
                len(signals),
            )
        )
    return rows


def format_rows(rows: list[OpRow]) -> str:
    """The rows and their sum as a text table."""
    head = f"{'operation':10} {'tasks':>7} {'bytes per SM: min':>18} {'max':>13} {'counters':>9} "
    lines = [head + f"{'arrivals':>9}"]
    for row in rows:
        lines.append(
            f"{row.op:10} {row.tasks:7,} {row.min_bytes:18,} {row.max_bytes:13,} "
            f"{row.counters:9,} {row.arrivals:9,}"
        )
    lines.append(
        f"{'all':10} {sum(r.tasks for r in rows):7,} {sum(r.total_bytes for r in rows):18,} "
        f"{'(all SMs)':>13} {sum(r.counters for r in rows):9,} {sum(r.arrivals for r in rows):9,}"
    )
    return "\n".join(lines)
