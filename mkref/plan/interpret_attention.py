"""Attention and the merge of its chunks, in NumPy, bit for bit as `cuda/megakernel.cu`.

All items of a task are worked on side by side: first every item's first page, then the second page
of those that have one.

What it does not do: read a key or value that the row cannot see.

Notation: I items, G query heads of a KV head, D head dimension, U units of a merge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mkref.plan.build import CHUNK_PAGES, GROUP_COLUMNS, PAGE
from mkref.plan.memory import A_ORDER, B_ORDER
from mkref.plan.products import chain
from mkref.plan.runtime import AttentionItems, attention_items, split_counts
from mkref.plan.task import Flag, Task
from mkref.reference.mma import WARPS, sum_warps
from mkref.reference.scalars import F32, Float, Words, exp2, from_bf16, score_scale, to_bf16

if TYPE_CHECKING:
    from mkref.plan.interpret_ops import Ints, Step

__all__ = ["attention", "merge"]

MINUS_INF = F32(-np.inf)
KEY_TILES = PAGE // 16
CHUNK_TILES = CHUNK_PAGES * KEY_TILES
UNIT = 32  # outputs of one row that MERGE makes at a time


def attention(s: Step, task: Task) -> None:
    """(m, l, O) of this slot's splits: all scores of a chunk, then its probabilities and values.

    Chunks that follow in a split: what there is is scaled to the new maximum, then added to.
    """
    c, b = s.config, s.buffers
    items = attention_items(s.positions, task.window, c.num_key_value_heads, task)
    if not len(items):
        return
    group, width = c.group_size, c.head_dim
    q = _queries(b["q"][items.row, items.head], group)
    scores = np.full((len(items), CHUNK_PAGES, group, PAGE), MINUS_INF)
    loaded: list[tuple[int, Ints, Words]] = []
    for turn in range(CHUNK_PAGES):
        page = items.first_page // CHUNK_PAGES * CHUNK_PAGES + turn
        mine = np.flatnonzero((page >= items.first_page) & (page <= items.last_page))
        if not len(mine):
            continue
        keys, values, visible = _page(s, task, items[mine], page[mine])
        zeros = np.zeros((len(mine), group, PAGE), dtype=F32)
        products = chain(zeros, keys, q[mine]) * score_scale(width)
        scores[mine, turn] = np.where(visible[:, None, :], products, MINUS_INF)
        loaded.append((turn, mine, values))

    m = np.fmax.reduce(scores, axis=(1, 3), initial=MINUS_INF)  # NaN loses
    sums = np.zeros((len(items), group, CHUNK_TILES), dtype=F32)
    out = np.zeros((len(items), group, width), dtype=F32)
    total = np.zeros((len(items), group), dtype=F32)
    for nth in range(items.nth.max() + 1):
        now = np.flatnonzero(items.nth == nth)
        if nth > 0:
            m[now] = np.fmax(m[now], m[now - 1])
            scale = exp2(m[now - 1] - m[now])
            total[now] = total[now - 1] * scale
            out[now] = out[now - 1] * scale[..., None]
        for turn, of_page, page_values in loaded:
            here = np.flatnonzero(items.nth[of_page] == nth)
            mine, values = of_page[here], page_values[here]
            p = to_bf16(exp2(scores[mine, turn] - m[mine, :, None]))
            sums[mine, :, turn * KEY_TILES : (turn + 1) * KEY_TILES] = _tile_sums(p)
            out[mine] = chain(out[mine], values, np.ascontiguousarray(p.swapaxes(1, 2)))
        of_chunk = sums[now, :, 0]
        for tile in range(1, CHUNK_TILES):
            of_chunk = of_chunk + sums[now, :, tile]
        total[now] = total[now] + of_chunk
    ends = np.append(items.nth[1:], 0) == 0  # the next one begins a split
    at = items.row[ends], items.head[ends], items.split[ends]
    b["part_o"][(*at, slice(None, group))] = out[ends]
    b["part_ml"][(*at, slice(None, group))] = np.stack([m, total], axis=-1)[ends]


def _queries(words: Words, group: int) -> Words:
    """[I, D / 16, 8, 16] in B order to [I, D, G]."""
    items, dim_tiles, _, _ = words.shape
    # [I, D / 16, 8, t, kh, p] -> [I, D / 16, kh, t, p, 8]
    parts = words.reshape(items, dim_tiles, GROUP_COLUMNS, 4, 2, 2).transpose(0, 1, 4, 3, 5, 2)
    return np.ascontiguousarray(parts).reshape(items, dim_tiles * 16, GROUP_COLUMNS)[:, :, :group]


def _page_tiles(s: Step, task: Task, row: Ints, head: Ints, page: Ints) -> Ints:
    """Tiles of a page of each row and KV head: int64 [I, D / 2]."""
    c = s.config
    kind = 1 if task.flags & Flag.SLIDING else 0
    number = s.buffers["page_table"][kind, row, page].astype(np.int64)
    n_tiles = c.head_dim // 2
    first = task.kv_tiles + (number * c.num_key_value_heads + head) * n_tiles
    return np.asarray(first[:, None] + np.arange(n_tiles))


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
    s: Step, task: Task, items: AttentionItems, page: Ints
) -> tuple[Words, Words, np.ndarray]:
    """One page of each item: keys [I, D, 64], values [I, 64, D], and which are visible [I, 64]."""
    b = s.buffers
    tiles = _page_tiles(s, task, items.row, items.head, page)
    keys, values = _unpack(b["kv"][tiles], s.config.head_dim)
    absolute = page[:, None] * PAGE + np.arange(PAGE)
    visible = (absolute >= items.first_key[:, None]) & (absolute <= items.last_key[:, None])

    # What this step appends is not in the page yet: the row's own token, and those of the rows
    # before it that feed earlier tokens of the same sequence.
    age = items.last_key[:, None] - absolute
    item, key = np.nonzero((age >= 0) & (age <= b["earlier"][items.row][:, None]))
    row, head = items.row[item] - age[item, key], items.head[item]
    keys[item, :, key] = b["k_new"][row, head]
    values[item, key] = b["v_new"][row, head]

    # What the page holds after the token or before the window is no one's: 0 times NaN is NaN.
    keys *= visible[:, None, :]
    values *= visible[:, :, None]
    return keys, values, visible


def _tile_sums(p: Words) -> Float:
    """Sum over each tile of 16 keys, [I, G, 64] -> float32 [I, G, 4]: a butterfly of 8 lanes."""
    halves = from_bf16(p).reshape(*p.shape[:2], KEY_TILES, 2, 8)
    lanes = halves[..., 0, :] + halves[..., 1, :]  # lane g has keys g and g + 8
    for step in (1, 2, 4):
        lanes = lanes + lanes[..., np.arange(8) ^ step]
    return lanes[..., 0]


def merge(s: Step, task: Task) -> None:
    """Attention output from the results of all splits, in B order; K and V of this step appended.

    Everybody's copies of the pages have landed: MERGE waits for all of ATTENTION.
    """
    c, b = s.config, s.buffers
    _append(s, task)
    units = np.arange(task.first, s.rows * (c.q_width // UNIT), task.count)
    if not len(units):
        return
    row, block = np.divmod(units, c.q_width // UNIT)
    out = block[:, None] * UNIT + np.arange(UNIT)  # [U, 32], of one query head
    query_head = block * UNIT // c.head_dim
    head, in_group = np.divmod(query_head, c.group_size)

    n_splits = split_counts(s.positions, task.window)[row]
    splits = np.arange(n_splits.max())
    has = splits < n_splits[:, None]  # [U, splits]
    at = np.minimum(splits, n_splits[:, None] - 1)  # never reads what nobody wrote
    ml = b["part_ml"][row[:, None], head[:, None], at, in_group[:, None]]
    m = np.where(has, ml[..., 0], MINUS_INF)
    weight = exp2(m - np.fmax.reduce(m, axis=1, initial=MINUS_INF)[:, None])
    # [U, splits, 32]
    parts = b["part_o"][
        row[:, None, None],
        head[:, None, None],
        at[:, :, None],
        in_group[:, None, None],
        out[:, None, :] % c.head_dim,
    ]
    total = _sum_splits(np.where(has, ml[..., 1] * weight, F32(0)))
    o = _sum_splits(np.where(has[:, :, None], parts * weight[:, :, None], F32(0)))
    b["attn"][out // 16, row[:, None], B_ORDER[out % 16]] = to_bf16(o / total[:, None])


def _sum_splits(terms: Float) -> Float:
    """Sum over the splits as eight warps add, float32 [U, splits, ...] -> [U, ...].

    Warp w adds splits w, w + 8, w + 16, ...; then the warps' sums are added in order.
    """
    warps = np.zeros((WARPS, len(terms), *terms.shape[2:]), dtype=F32)
    for split in range(terms.shape[1]):
        warps[split % WARPS] += terms[:, split]
    return sum_warps(warps)


def _append(s: Step, task: Task) -> None:
    """Keys and values of this step into their pages; row and head decide which slot does it."""
    c, b = s.config, s.buffers
    units = np.arange(s.rows * c.num_key_value_heads)
    units = units[units % task.count == task.count - 1 - task.first]
    row, head = np.divmod(units, c.num_key_value_heads)
    page, key = np.divmod(s.positions[row], PAGE)
    tiles = _page_tiles(s, task, row, head, page)  # [units, D / 2]
    dim, dim_tiles = np.arange(c.head_dim), c.head_dim // 16
    each, key = np.arange(len(units))[:, None], key[:, None]
    k_tile = tiles[each, key // 16 * dim_tiles + dim // 16]  # [units, D]
    v_tile = tiles[each, KEY_TILES * dim_tiles + dim // 16 * KEY_TILES + key // 16]
    b["kv"][k_tile, A_ORDER[key % 16, dim % 16]] = b["k_new"][row, head]
    b["kv"][v_tile, A_ORDER[dim % 16, key % 16]] = b["v_new"][row, head]
