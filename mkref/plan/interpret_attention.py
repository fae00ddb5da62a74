"""Attention and the merge of its chunks, in NumPy, bit for bit as `cuda/megakernel.cu`.

All items of a task are worked on side by side: first every item's first page, then the second page
of those that have one.

What it does not do: read a key or value that the row cannot see.

Notation: I items, G query heads of a KV head, D head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.build import PAGE, ROWS
from mkref.plan.memory import A_ORDER, B_ORDER
from mkref.plan.products import chain
from mkref.plan.runtime import AttentionItems, attention_items, chunk_counts
from mkref.plan.task import Flag, Task
from mkref.reference.scalars import F32, Float, Words, exp2, from_bf16, score_scale, to_bf16

if TYPE_CHECKING:
    from mkref.plan.interpret_ops import Step

__all__ = ["attention", "merge"]

MINUS_INF = F32(-np.inf)
KEY_TILES = PAGE // 16
MERGE_THREADS = 256  # outputs that a MERGE slot takes at a time


def attention(s: Step, task: Task) -> None:
    """Partial outputs of this slot's chunks; then the step's keys and values go to their pages."""
    c, b = s.config, s.buffers
    positions = b["positions"][: s.rows].astype(np.int64)
    items = attention_items(positions, task.window, c.num_key_value_heads, task)
    if not len(items):
        return
    group, width = c.group_size, c.head_dim
    q = _queries(b["q"][items.row, items.head], group)
    m = np.full((len(items), group), MINUS_INF)
    total = np.zeros((len(items), group), dtype=F32)
    out = np.zeros((len(items), group, width), dtype=F32)
    for turn in range(2):
        has_page = np.flatnonzero(items.first_page + turn <= items.last_page)
        if not len(has_page):
            break
        part = items[has_page]
        page = part.first_page + turn
        tiles = b["kv"][_page_tiles(s, task, part, page)]
        keys, values = _unpack(tiles, width)
        state = (m[has_page], total[has_page], out[has_page])
        state = _page(s, part, page, q[has_page], keys, values, state)
        m[has_page], total[has_page], out[has_page] = state
    b["part_o"][items.row, items.head, items.chunk, :group] = out
    b["part_ml"][items.row, items.head, items.chunk, :group] = np.stack([m, total], axis=-1)
    _append(s, task, items)


def _queries(words: Words, group: int) -> Words:
    """[I, D / 16, 8, 16] in B order to [I, D, G]."""
    items, dim_tiles, _, _ = words.shape
    # [I, D / 16, 8, t, kh, p] -> [I, D / 16, kh, t, p, 8]
    parts = words.reshape(items, dim_tiles, ROWS, 4, 2, 2).transpose(0, 1, 4, 3, 5, 2)
    return np.ascontiguousarray(parts).reshape(items, dim_tiles * 16, ROWS)[:, :, :group]


def _page_tiles(s: Step, task: Task, items: AttentionItems, page: np.ndarray) -> np.ndarray:
    """Tiles of each item's page: int64 [I, D / 2]."""
    c = s.config
    kind = 1 if task.flags & Flag.SLIDING else 0
    number = s.buffers["page_table"][kind, items.row, page].astype(np.int64)
    n_tiles = c.head_dim // 2
    first = task.kv_tiles + (number * c.num_key_value_heads + items.head) * n_tiles
    return first[:, None] + np.arange(n_tiles)


def _unpack(tiles: Words, head_dim: int) -> tuple[Words, Words]:
    """Tiles [I, D / 2, 256] of a page: keys [I, D, 64] and values [I, 64, D]."""
    half = head_dim // 4

    def transposed(part: Words, k_tiles: int) -> Words:
        # [I, block, kt, g, t, kh, rh, p] -> [I, kt, kh, t, p, block, rh, g]
        split = part.reshape(len(part), -1, k_tiles, 8, 4, 2, 2, 2)
        moved = np.ascontiguousarray(split.transpose(0, 2, 5, 4, 7, 1, 6, 3))
        return moved.reshape(len(part), k_tiles * 16, -1)

    return transposed(tiles[:, :half], head_dim // 16), transposed(tiles[:, half:], KEY_TILES)


def _page(
    s: Step,
    items: AttentionItems,
    page: np.ndarray,
    q: Words,
    keys: Words,
    values: Words,
    state: tuple[Float, Float, Float],
) -> tuple[Float, Float, Float]:
    """One page of online softmax: (m, l, O) before to (m, l, O) after."""
    m, total, out = state
    every = np.arange(PAGE)
    now = items.last_key - page * PAGE  # this step's token within the page
    absolute = page[:, None] * PAGE + every
    visible = (absolute >= items.first_key[:, None]) & (absolute <= items.last_key[:, None])

    # The token of this step is not in its page yet; what the page holds after it is no one's.
    here = np.flatnonzero(now < PAGE)
    keys[here, :, now[here]] = s.buffers["k_new"][items.row[here], items.head[here]]
    values[here, now[here]] = s.buffers["v_new"][items.row[here], items.head[here]]
    keys *= visible[:, None, :]  # their scores become -inf below
    values *= visible[:, :, None]

    zeros = np.zeros((len(items), q.shape[2], PAGE), dtype=F32)
    scores = chain(zeros, keys, q) * score_scale(s.config.head_dim)
    scores = np.where(visible[:, None, :], scores, MINUS_INF)
    top = np.fmax(m, np.fmax.reduce(scores, axis=2))
    p = to_bf16(exp2(scores - top[:, :, None]))
    scale = exp2(m - top)
    total = total * scale + _sum_probabilities(p)
    out = chain(out * scale[:, :, None], values, np.ascontiguousarray(p.swapaxes(1, 2)))
    return top, total, out


def _sum_probabilities(p: Words) -> Float:
    """Sum over the 64 keys as a warp adds: lane t has keys 16 j + (2t, 2t+1, 2t+8, 2t+9)."""
    # key = 16 j + 8 hi + 2 t + lo
    parts = from_bf16(p).reshape(*p.shape[:2], KEY_TILES, 2, 4, 2)
    lanes = np.zeros((*p.shape[:2], 4), dtype=F32)
    for j in range(KEY_TILES):
        for hi in range(2):
            for lo in range(2):
                lanes = lanes + parts[:, :, j, hi, :, lo]
    return (lanes[..., 0] + lanes[..., 1]) + (lanes[..., 2] + lanes[..., 3])


def _append(s: Step, task: Task, items: AttentionItems) -> None:
    """Keys and values of this step into their pages, by the owner of each row's last chunk."""
    page = items.last_key // PAGE
    mine = np.flatnonzero(page <= items.last_page)
    items, page = items[mine], page[mine]
    tiles = _page_tiles(s, task, items, page)  # [I, D / 2]
    key = (items.last_key % PAGE)[:, None]
    dim = np.arange(s.config.head_dim)
    dim_tiles = s.config.head_dim // 16
    each = np.arange(len(items))[:, None]
    k_tile = tiles[each, key // 16 * dim_tiles + dim // 16]  # [I, D]
    v_tile = tiles[each, KEY_TILES * dim_tiles + dim // 16 * KEY_TILES + key // 16]
    kv = s.buffers["kv"]
    kv[k_tile, A_ORDER[key % 16, dim % 16]] = s.buffers["k_new"][items.row, items.head]
    kv[v_tile, A_ORDER[dim % 16, key % 16]] = s.buffers["v_new"][items.row, items.head]


def merge(s: Step, task: Task) -> None:
    """Attention output from the chunks' results, ascending, in B order."""
    c, b = s.config, s.buffers
    blocks = np.arange(task.first, -(-s.rows * c.q_width // MERGE_THREADS), task.count)
    i = (blocks[:, None] * MERGE_THREADS + np.arange(MERGE_THREADS)).reshape(-1)
    i = i[i < s.rows * c.q_width]
    if not len(i):
        return
    row, out = i // c.q_width, i % c.q_width
    head, dim = out // c.head_dim, out % c.head_dim
    n_chunks = chunk_counts(b["positions"][: s.rows].astype(np.int64), task.window)[row]
    part = (row, head // c.group_size)
    in_group = head % c.group_size
    chunks = range(int(n_chunks.max()))
    # A row without chunk k gets m = -inf there: its weight is 0, but its sums are left alone.
    ml = [
        np.where((k < n_chunks)[:, None], b["part_ml"][(*part, k, in_group)], MINUS_INF)
        for k in chunks
    ]
    top = np.full(len(i), MINUS_INF)
    for k in chunks:
        top = np.fmax(top, ml[k][:, 0])
    total, o = np.zeros(len(i), dtype=F32), np.zeros(len(i), dtype=F32)
    for k in chunks:
        w = exp2(ml[k][:, 0] - top)
        has = k < n_chunks
        total = np.where(has, total + ml[k][:, 1] * w, total)
        o = np.where(has, o + b["part_o"][(*part, k, in_group, dim)] * w, o)
    b["attn"][out // 16, row, B_ORDER[out % 16]] = to_bf16(o / total)
