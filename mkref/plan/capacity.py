"""Checks of memory: pages of the KV pool and sizes of buffers, computed from the tasks themselves.

What it does not do: allocate (`mkref.plan.buffers` is the table that machines follow).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.buffers import (
    BUFFERS,
    COUNTER_STRIDE,
    MAX_LAUNCH_STEPS,
    STATUS_WORDS,
    STOP_IDS,
    max_active,
)
from mkref.plan.build import CHUNK_PAGES, GROUP_COLUMNS, MOST_SPLITS, PAGE
from mkref.plan.effects import ROUTED
from mkref.plan.task import WORDS, Flag, Op
from mkref.weights.layout import TILE_WORDS, PackedLayout

if TYPE_CHECKING:
    from mkref.plan.buffers import Buffer
    from mkref.plan.table import TaskTable

__all__ = ["check_buffers", "check_pool", "needed_elements"]

ELEMENT_BYTES = {
    "uint4": 2,  # copied 16 bytes at a time, counted in bf16 values
    "Task": 4,  # counted in words
    "uint16_t": 2,
    "int": 4,
    "uint32_t": 4,
    "float": 4,
    "uint64_t": 8,
}
"""Bytes of one element in the shapes of `mkref.plan.buffers`, by C type."""


def check_pool(table: TaskTable, max_context: int | None) -> Iterator[str]:
    """Layers have their own part of the pool; one sequence of `max_context` tokens fits."""
    pool, config = table.plan.pool, table.plan.config
    for kind, pages in (("full", pool.full_pages), ("sliding", pool.sliding_pages)):
        if pages < 0:
            yield f"{kind}_pages: {pages}, must be at least 0"
            return
    ends: list[tuple[int, int, int]] = []
    for layer in range(config.num_hidden_layers):
        for base in np.unique(table["kv_tiles"][table.group(Op.ATTENTION, layer)]).tolist():
            ends.append((base, base + pool.layer_tiles(config, layer), layer))
    ends.sort()
    for (_, end, layer), (base, _, above) in pairwise(ends):
        if end > base:
            yield (
                f"KV pages of layer {above} begin at tile {base}, within those of layer {layer}, "
                f"which end at tile {end}"
            )
    total = pool.total_tiles(config)
    if ends and ends[-1][1] > total:
        yield f"KV pages of layer {ends[-1][2]} end at tile {ends[-1][1]} of a pool of {total}"
    if max_context is None:
        return
    if max_context < 1:
        yield f"max_context: {max_context} tokens, must be at least 1"
        return
    pages = -(-max_context // PAGE)
    # The last `window` tokens may begin at the end of a page.
    in_window = min(pages, -(-(config.sliding_window - 1) // PAGE) + 1)
    kinds = [config.is_sliding(layer) for layer in range(config.num_hidden_layers)]
    for kind, have, need in (
        ("full", pool.full_pages, pages),
        ("sliding", pool.sliding_pages, in_window),
    ):
        if (kind == "sliding") in kinds and have < need:
            yield (
                f"{kind}_pages: {have} pages of {PAGE} tokens, but one sequence of {max_context} "
                f"tokens needs {need}"
            )


def needed_elements(table: TaskTable, max_context: int) -> dict[str, int]:
    """Elements of every buffer that the tasks may touch."""
    plan, c, rows = table.plan, table.plan.config, table.plan.rows
    pages = -(-max_context // PAGE)
    splits = min(-(-pages // CHUNK_PAGES), MOST_SPLITS)
    parts = rows * c.num_key_value_heads * splits * GROUP_COLUMNS
    routed = np.isin(table["op"], list(ROUTED))
    granules = np.where(table["op"] == Op.GATE_UP, table["blocks"], 0)
    active = np.where(table["flags"] & Flag.DENSE, 1, max_active(c, rows))
    h = int((granules * active)[routed].max(initial=0)) * 8 * rows
    heads = table["index"][table["op"] == Op.HEAD].max(initial=-1) + 1
    kv_end = 0
    for layer in range(c.num_hidden_layers):
        base = table["kv_tiles"][table.group(Op.ATTENTION, layer)].max(initial=0)
        kv_end = max(kv_end, int(base) + plan.pool.layer_tiles(c, layer))
    return {
        "weights": PackedLayout(c).total_tiles * TILE_WORDS,
        "gammas": (c.num_hidden_layers + 1) * c.hidden_size,
        "rope": max_context * c.head_dim,
        "tasks": len(table) * WORDS,
        "task_offsets": plan.n_sm + 1,
        "tokens": rows,
        "positions": rows,
        "earlier": rows,
        "stop_ids": rows * STOP_IDS,
        "page_table": 2 * rows * pages,
        "temperatures": rows,
        "seeds": 2 * rows,
        "kv": kv_end * TILE_WORDS,
        "x": 2 * rows * c.hidden_size,
        "x_mid": rows * c.hidden_size,
        "router_logits": rows * c.num_experts,
        "q": rows * c.num_key_value_heads * GROUP_COLUMNS * c.head_dim,
        "k_new": rows * c.kv_width,
        "v_new": rows * c.kv_width,
        "part_o": parts * c.head_dim,
        "part_ml": parts * 2,
        "attn": rows * c.q_width,
        "h": h,
        "logits": rows * c.vocab_size,
        "best_values": int(heads) * rows,
        "best_tokens": int(heads) * rows,
        "control": 4,  # whole, though only the first is in use
        "active_experts": c.num_hidden_layers,
        "tokens_out": MAX_LAUNCH_STEPS * rows,
        "progress": 2,
        "counters": len(plan.counters) * COUNTER_STRIDE,
        "status": STATUS_WORDS,
    }


def check_buffers(
    table: TaskTable, max_context: int, buffers: Mapping[str, Buffer]
) -> Iterator[str]:
    """Every buffer exists, its elements have the size of its C type, and it is large enough."""
    needed = needed_elements(table, max_context)
    for name, ctype in BUFFERS.items():
        need = needed.get(name)  # None for "trace": a machine that does not trace needs none
        if name not in buffers:
            if need is not None:
                yield f"buffer {name!r}: missing"
            continue
        size = ELEMENT_BYTES[ctype.removeprefix("const ").removesuffix("*")]
        dtype = np.dtype(buffers[name].dtype)
        if dtype.itemsize != size:
            yield f"buffer {name!r}: elements of {dtype.itemsize} bytes ({dtype}), must be {size}"
        have = math.prod(buffers[name].shape)
        if need is not None and have < need:
            yield f"buffer {name!r}: {have} elements ({ctype}), the tasks need {need}"
