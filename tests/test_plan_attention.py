"""Attention of the interpreter alone, against float64: pages, windows, garbage, appended keys."""

from __future__ import annotations

import numpy as np
import pytest

from mkref.plan import Flag, Op, Task
from mkref.plan.interpret_attention import attention, merge
from mkref.reference.scalars import from_bf16, to_bf16
from mkref.weights.layout import from_b_order, pack_kv_page, to_b_order, unpack_kv_page
from tests.desk import BF16, POSITIONS, Desk, Wide, close, untouched


class Cache:
    """Keys and values of five rows in shuffled pages; everything else in the pool is poison."""

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
        self.k, self.v = from_bf16(to_bf16(values)).astype(np.float64)
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


def attend(desk: Desk, layer: int, cache: Cache, n_slots: int) -> None:
    """ATTENTION and MERGE of a layer on some SMs."""
    flags = Flag.SLIDING if cache.kind else 0
    words = {"window": cache.window, "kv_tiles": cache.base, "flags": flags}
    for slot in range(n_slots):
        attention(desk.step, Task(Op.ATTENTION, layer, slot, n_slots, **words))
    for slot in range(n_slots):
        merge(desk.step, Task(Op.MERGE, layer, slot, n_slots, window=cache.window))


ATTENTION = ("kv", "part_o", "part_ml", "attn")


def set_q(desk: Desk) -> Wide:
    """Random q in the kernel's order, and as [row, head, D]; heads that do not exist are poison."""
    c, n = desk.config, desk.rows
    q = to_bf16(desk.normal(n, c.num_key_value_heads, c.group_size, c.head_dim))
    for row in range(n):
        for head in range(c.num_key_value_heads):
            ordered = to_b_order(q[row, head])
            desk.buffers["q"][row, head, :, : c.group_size] = ordered
    return from_bf16(q).astype(np.float64)


GEOMETRIES: dict[str, dict[str, object]] = {
    "small": {},
    "one head each": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64},
    "wide": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
}


@pytest.mark.parametrize("layer", [1, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_attention_and_merge(name: str, layer: int) -> None:
    """Softmax over the visible keys in float64, and this step's key and value in their page.

    Probabilities are rounded to bfloat16, which counts above and below the division, and so is the
    output: three times 2^-8. What the scores are off by, about 2^-13, is small beside that.
    """
    desk = Desk(**GEOMETRIES[name])
    c = desk.config
    q, cache = set_q(desk), Cache(desk, layer)
    before = desk.buffers["kv"].copy()
    desk.run(*ATTENTION, do=lambda: attend(desk, layer, cache, 2))
    attn = from_bf16(from_b_order(desk.buffers["attn"][:, : desk.rows]))
    for row, position in enumerate(POSITIONS):
        first = max(0, position - cache.window + 1) if cache.window else 0
        k, v = (a[row, :, first : position + 1] for a in (cache.k, cache.v))
        scores = np.einsum("jgd,jsd->jgs", q[row], k) / np.sqrt(c.head_dim)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        expected = np.einsum("jgs,jsd->jgd", p, v)
        tolerance = 3 * BF16 * np.einsum("jgs,jsd->jgd", p, np.abs(v))
        assert close(expected.reshape(-1), attn[row], tolerance.reshape(-1)), row
        for head in range(c.num_key_value_heads):
            at = cache.tiles(desk, row, position // 64, head)
            keys, values = unpack_kv_page(desk.buffers["kv"][at], c.head_dim)
            old_keys, old_values = unpack_kv_page(before[at], c.head_dim)
            old_keys[position % 64] = desk.buffers["k_new"][row, head]
            old_values[position % 64] = desk.buffers["v_new"][row, head]
            assert np.array_equal(old_keys, keys)
            assert np.array_equal(old_values, values)
    changed = np.count_nonzero(before != desk.buffers["kv"])
    assert changed <= desk.rows * 2 * c.kv_width
    assert untouched(desk.buffers["attn"][:, desk.rows :])
    assert untouched(desk.buffers["part_o"][desk.rows :])
    if c.group_size < 8:
        assert untouched(desk.buffers["part_o"][:, :, :, c.group_size :])


@pytest.mark.parametrize("layer", [1, 4])
def test_what_lies_behind_the_token_does_not_matter(layer: int) -> None:
    """NaN, infinity or numbers after the token in its page, any number of slots: the same bits."""
    results = set()
    for garbage, n_slots in ((np.nan, 1), (np.inf, 3), (1e30, 7), (0.0, 50)):
        desk = Desk()
        set_q(desk)
        cache = Cache(desk, layer, garbage)
        with np.errstate(all="ignore"):
            attend(desk, layer, cache, n_slots)
        results.add(tuple(desk.buffers[name].tobytes() for name in ATTENTION[1:]))
    assert len(results) == 1
