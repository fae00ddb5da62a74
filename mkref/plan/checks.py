"""Checks of single words: opcodes, ranges, operands that the geometry fixes, counters, flags.

Each check yields one sentence per violation. They run before the checks of order
(`mkref.plan.hazards`), which rely on them.

What it does not do: look at the order of tasks (`mkref.plan.sequence`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.build import ROW_CHOICES
from mkref.plan.effects import EARLY, ROUTED, ROW_OPS, layers_of, row_blocks
from mkref.plan.task import NO_COUNTER, Flag, Op, Task
from mkref.weights.layout import TILE, PackedLayout

if TYPE_CHECKING:
    from mkref.plan.table import Ints, TaskTable

__all__ = ["check_counters", "check_operands", "check_words"]

COMMON = {"op", "layer", "first", "count", "wait", "wait_count", "signal", "flags"}
USED = {
    Op.EMBED: COMMON | {"weights"},
    Op.ROUTER: COMMON | {"weights", "k_tiles"},
    Op.QKV: COMMON | {"weights", "k_tiles"},
    Op.ATTENTION: COMMON | {"window", "kv_tiles", "route_wait", "route_count"},
    Op.MERGE: COMMON | {"window", "kv_tiles"},
    Op.GATE_UP: COMMON | {"weights", "k_tiles", "blocks", "route_wait", "route_count", "index"},
    Op.O_PROJ: COMMON | {"weights", "k_tiles"},
    Op.DOWN: COMMON | {"weights", "k_tiles", "blocks", "route_wait", "route_count"},
    Op.HEAD: COMMON | {"weights", "k_tiles", "index"},
    Op.SAMPLE: COMMON | {"index"},
}
"""Words that an operation looks at; the others must have their default."""

DEFAULTS = Task(0, 0, 0, 0)
IDLE = (Op.O_PROJ, Op.DOWN, Op.HEAD)
"""May be there without rows, for the sake of what they wait for or signal."""


def check_words(table: TaskTable) -> Iterator[str]:
    """Rows, opcodes, layers, ranges of row blocks and slots, counter numbers, unused words."""
    config, n_counters = table.plan.config, len(table.plan.counters)
    if table.plan.rows not in ROW_CHOICES:
        yield f"rows: {table.plan.rows} rows of a batch, must be one of {ROW_CHOICES}"
    for record in np.flatnonzero(~np.isin(table["op"], list(Op))):
        yield f"{table.place(record)}: 0..{max(Op)} are the operations"
    for field in ("wait", "route_wait", "signal"):
        wrong = (table[field] < NO_COUNTER) | (table[field] >= n_counters)
        for record in np.flatnonzero(wrong):
            yield (
                f"{table.place(record)}: {field} = {table[field][record]} is no counter; "
                f"-1 for none, or 0..{n_counters - 1}"
            )
    for op in Op:
        mine = np.flatnonzero(table["op"] == op)
        layers = layers_of(config, op)
        for record in mine[~np.isin(table["layer"][mine], list(layers))]:
            yield f"{table.place(record)}: the model has no {op.name} there"
        first, count = table["first"][mine], table["count"][mine]
        if op in ROW_OPS:
            blocks = row_blocks(config, op)
            wrong = (first < 0) | (count < (op not in IDLE)) | (first + count > blocks)
            unit = f"row blocks {{}}..{{}} are not a range within 0..{blocks - 1}"
        else:
            # GATE_UP: two slots are the halves of one share.
            wrong = (first < 0) | (first >= count) | ((op == Op.GATE_UP) & (count % 2 != 0))
            unit = f"{'half' if op == Op.GATE_UP else 'slot'} {{}} of {{}} does not exist"
        for record in mine[wrong]:
            a, n = table["first"][record], table["count"][record]
            yield f"{table.place(record)}: {unit.format(a, a + n - 1 if op in ROW_OPS else n)}"
        for field in sorted(set(table.columns) - USED[op]):
            default = getattr(DEFAULTS, field)
            for record in mine[table[field][mine] != default]:
                yield (
                    f"{table.place(record)}: {field} = {table[field][record]}, "
                    f"but {op.name} has no use for it; it must be {default}"
                )


def expected_operands(layout: PackedLayout, op: Op, layer: int) -> dict[str, int]:
    """Words that follow from geometry and layer; not `kv_tiles`, nor flags of what is last."""
    config = layout.config
    hidden = config.hidden_size // TILE
    if op == Op.EMBED:
        return {"weights": layout.head, "flags": 0}
    if op == Op.HEAD:
        return {"weights": layout.head, "k_tiles": hidden, "flags": 0}
    if op == Op.SAMPLE:
        return {"flags": 0}
    at = layout.layer(layer)
    sliding, width = config.is_sliding(layer), config.mlp_width(layer)
    window = config.sliding_window if sliding else 0
    dense = Flag.DENSE if config.is_dense(layer) else 0
    return {
        Op.ROUTER: {"weights": at.router, "k_tiles": hidden, "flags": 0},
        Op.QKV: {
            "weights": at.qkv,
            "k_tiles": hidden,
            "flags": Flag.ROPE if config.uses_rope(layer) else 0,
        },
        Op.ATTENTION: {"window": window, "flags": Flag.SLIDING if sliding else 0},
        Op.MERGE: {"window": window, "flags": Flag.SLIDING if sliding else 0},
        Op.GATE_UP: {
            "weights": at.gate_up,
            "k_tiles": hidden,
            "blocks": width // 8,
            "flags": dense,
            "index": sum(row_blocks(config, o) for o in (Op.ROUTER, Op.QKV)[bool(dense) :]),
        },
        Op.O_PROJ: {"weights": at.o, "k_tiles": config.q_width // TILE, "flags": 0},
        Op.DOWN: {
            "weights": at.down,
            "k_tiles": width // TILE,
            "blocks": hidden,
            "flags": dense,
        },
    }[op]


def check_operands(table: TaskTable) -> Iterator[str]:
    """Weight offsets, depths, windows, flags and KV bases are those of the geometry."""
    plan, config = table.plan, table.plan.config
    layout = PackedLayout(config)
    for op in Op:
        for layer in layers_of(config, op):
            mine = table.group(op, layer)
            expected = expected_operands(layout, op, layer)
            if op in (Op.ATTENTION, Op.MERGE):
                expected["kv_tiles"] = plan.pool.base(config, layer)
            for field, want in expected.items():
                have = table[field][mine]
                if field == "flags":
                    free = Flag.LAST_OF_LAYER | (Flag.RELEASE if op in ROUTED else 0)
                    free |= Flag.EARLY if op in EARLY and layer > 0 else 0
                    have = have & ~free
                for record in mine[have != want]:
                    yield (
                        f"{table.place(record)}: {field} = {table[field][record]}, "
                        f"must be {int(want)}"
                    )
    ends, total = _weight_ends(table), layout.total_tiles
    for record in np.flatnonzero(ends > total):
        yield (
            f"{table.place(record)}: its weights end at tile {ends[record]}, "
            f"the packed array has {total}"
        )


def _weight_ends(table: TaskTable) -> Ints:
    """One past the last tile that a task may read."""
    config = table.plan.config
    depth = np.maximum(table["k_tiles"], 1)
    rows = table["first"] + table["count"]
    experts = np.where(table["flags"] & Flag.DENSE, 1, config.num_experts)
    rows = np.where(np.isin(table["op"], list(ROUTED)), experts * table["blocks"], rows)
    embed = row_blocks(config, Op.HEAD) * (config.hidden_size // TILE)
    rows = np.where(table["op"] == Op.EMBED, embed, rows)
    streams = np.isin(table["op"], [*ROW_OPS, Op.GATE_UP])
    return np.where(streams, table["weights"] + rows * depth, 0)


def check_counters(table: TaskTable) -> Iterator[str]:
    """Every counter gets exactly its target of arrivals, and every wait asks for all of them."""
    counters = table.plan.counters
    signals = table["signal"][table["signal"] != NO_COUNTER]
    arrivals = np.bincount(signals, minlength=len(counters))
    for index, counter in enumerate(counters):
        if counter.target != arrivals[index]:
            yield (
                f"counter {counter.name!r}: target {counter.target}, "
                f"but {arrivals[index]} tasks signal it"
            )
    for wait, count in (("wait", "wait_count"), ("route_wait", "route_count")):
        waiting = table[wait] != NO_COUNTER
        want = np.where(waiting, arrivals[table[wait]] if len(counters) else 0, 0)
        for record in np.flatnonzero(table[count] != want):
            name = table.counter(table[wait][record])
            yield (
                f"{table.place(record)}: {count} = {table[count][record]} of {name}, "
                f"which {want[record]} tasks signal"
            )
        for record in np.flatnonzero(waiting & (want == 0)):
            yield f"{table.place(record)}: nobody signals {table.counter(table[wait][record])}"
    announced = np.ones(len(counters), dtype=bool)
    silent = (table["op"] != Op.DOWN) | (table["count"] == 0)  # who writes x announces it
    announced[table["signal"][(table["signal"] != NO_COUNTER) & silent]] = False
    for record in np.flatnonzero(table["flags"] & Flag.EARLY):
        wait = table["wait"][record]
        if wait == NO_COUNTER or not announced[wait]:
            yield (
                f"{table.place(record)}: waits for {table.counter(wait)}; must be one that only "
                "DOWN signals, which announces x (Flag.EARLY)"
            )
    sparse = ~np.isin(table["layer"], _dense_layers(table))
    routed = np.isin(table["op"], list(ROUTED))
    for record in np.flatnonzero(routed & sparse & (table["route_wait"] == NO_COUNTER)):
        yield f"{table.place(record)}: no route_wait, but its loader reads the router logits"
    for record in np.flatnonzero(routed & ~sparse & (table["route_wait"] != NO_COUNTER)):
        yield f"{table.place(record)}: route_wait in a dense layer, which has no router"


def _dense_layers(table: TaskTable) -> list[int]:
    config = table.plan.config
    return [layer for layer in range(config.num_hidden_layers) if config.is_dense(layer)]
