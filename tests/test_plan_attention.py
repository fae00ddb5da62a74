"""Attention of the interpreter alone: against float64 and against loops in the contract's order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mkref.plan import Op, Task
from mkref.plan.interpret_attention import merge
from mkref.reference import mma
from mkref.reference.scalars import exp2, from_bf16, score_scale, to_bf16
from mkref.weights.layout import from_b_order, unpack_kv_page
from tests.desk import BF16, POSITIONS, Desk, Wide, close, untouched
from tests.pages import ATTENTION, Cache, Words, attend, set_q

Float = npt.NDArray[np.float32]


def first_key(position: int, window: int) -> int:
    """First visible key."""
    return max(0, position - window + 1) if window else 0


GEOMETRIES: dict[str, dict[str, Any]] = {
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
    q, cache = from_bf16(set_q(desk)).astype(np.float64), Cache(desk, layer)
    before = desk.buffers["kv"].copy()
    desk.run(*ATTENTION, do=lambda: attend(desk, layer, cache, 2))
    attn = from_bf16(from_b_order(desk.buffers["attn"][:, : desk.rows]))
    for row, position in enumerate(POSITIONS):
        first = first_key(position, cache.window)
        k, v = (a[row, :, first : position + 1] for a in (cache.k, cache.v))
        scores = np.einsum("jgd,jsd->jgs", q[row], k) / np.sqrt(c.head_dim)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        expected: Wide = np.einsum("jgs,jsd->jgd", p, v)
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


def chunk_by_loops(q: Words, k: Words, v: Words, visible: np.ndarray) -> tuple[Float, Float, Float]:
    """(m, l, O) of 128 keys: q [G, D], k and v [128, D]; the sums as docs/numerics.md writes them.

    Returns:
        float32 [G], [G], [G, D].
    """
    group, dim = q.shape
    k, v = (np.where(visible[:, None], words, np.uint16(0)) for words in (k, v))
    scores = mma.chain(np.zeros((128, group), np.float32), k, q.T) * score_scale(dim)
    scores[~visible] = -np.inf
    m = scores.max(axis=0)
    words = to_bf16(exp2(scores - m))  # [128, G]
    total = np.zeros(group, np.float32)
    for tile in range(8):
        p = from_bf16(words[16 * tile : 16 * tile + 16])
        lanes = [p[g] + p[g + 8] for g in range(8)]
        for step in (1, 2, 4):
            lanes = [lanes[g] + lanes[g ^ step] for g in range(8)]
        total = total + lanes[0]
    out = mma.chain(np.zeros((dim, group), np.float32), np.ascontiguousarray(v.T), words)
    return m, total, out.T


def merge_by_loops(m: Float, total: Float, out: Float) -> Words:
    """The merge of chunks [c], [c], [c, D] of one query head: bfloat16 [D]."""
    weight = exp2(m - m.max())
    zero = np.float32(0)
    sums, outs = [zero] * 8, [np.zeros(out.shape[1], np.float32)] * 8
    for c in range(len(m)):
        sums[c % 8] = sums[c % 8] + total[c] * weight[c]
        outs[c % 8] = outs[c % 8] + out[c] * weight[c]
    for warp in range(1, 8):
        sums[0], outs[0] = sums[0] + sums[warp], outs[0] + outs[warp]
    return to_bf16(outs[0] / sums[0])


@pytest.mark.parametrize("layer", [1, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_sums_are_in_the_order_of_the_contract(name: str, layer: int) -> None:
    """m, l, O of every chunk and the merged output: the same bits as scalar loops.

    Scores have a standard deviation of 8: probabilities differ so much that sums of them round.
    """
    desk = Desk(**GEOMETRIES[name])
    c, b = desk.config, desk.buffers
    q, cache = set_q(desk, 8.0), Cache(desk, layer)
    attend(desk, layer, cache, 3)
    attn = from_b_order(b["attn"][:, : desk.rows]).reshape(desk.rows, -1, c.head_dim)
    for row, position in enumerate(POSITIONS):
        first = first_key(position, cache.window)
        for head in range(c.num_key_value_heads):
            parts = []
            for chunk, start in enumerate(range(first // 128 * 128, position + 1, 128)):
                keys = np.arange(start, start + 128)
                visible = (keys >= first) & (keys <= position)
                k, v = cache.words[:, row, head, start : start + 128]
                m, total, out = chunk_by_loops(q[row, head], k, v, visible)
                got = (row, head, chunk, slice(0, c.group_size))
                assert np.stack([m, total], axis=-1).tobytes() == b["part_ml"][got].tobytes()
                assert np.array_equal(out.view(np.uint32), b["part_o"][got].view(np.uint32))
                parts.append((m, total, out))
            for g in range(c.group_size):
                m, total, out = (np.stack([part[i][g] for part in parts]) for i in range(3))
                expected = merge_by_loops(m, total, out)
                assert np.array_equal(expected, attn[row, head * c.group_size + g])


@pytest.mark.parametrize("n_slots", [1, 5, 132])
def test_merge_adds_eight_chains_of_chunks(n_slots: int) -> None:
    """More chunks than warps, rows of very different lengths; what nobody wrote stays unread.

    Chunks cancel in pairs but for 2^-20, so that another order shows in the bfloat16 output.
    """
    desk = Desk(4, context=2688)
    c, b = desk.config, desk.buffers
    b["positions"][:4] = [2600, 130, 5, 1151]
    b["page_table"][...] = 0
    b["k_new"][:4] = b["v_new"][:4] = 0
    for row, n_chunks in enumerate((21, 2, 1, 9)):
        shape = (c.num_key_value_heads, n_chunks, c.group_size)
        at = (row, slice(None), slice(0, n_chunks), slice(0, c.group_size))
        sign = np.where(np.arange(n_chunks) % 2, -1.0, 1.0)[:, None, None]
        large = desk.normal(shape[0], 1, shape[2], c.head_dim) * 2.0**20
        b["part_o"][at] = sign * large + desk.normal(*shape, c.head_dim)
        b["part_ml"][(*at, 0)] = -(np.arange(n_chunks) // 2)[:, None]
        b["part_ml"][(*at, 1)] = 1 + desk.random.random(shape)
    words = {"kv_tiles": desk.plan.pool.base(c, 4)}
    for slot in range(n_slots):
        merge(desk.step, Task(Op.MERGE, 4, slot, n_slots, **words))
    attn = from_b_order(b["attn"][:, :4]).reshape(4, -1, c.head_dim)
    for row, n_chunks in enumerate((21, 2, 1, 9)):
        for head in range(c.num_attention_heads):
            part = (row, head // c.group_size, slice(0, n_chunks), head % c.group_size)
            m, total = b["part_ml"][part].T
            expected = merge_by_loops(m, total, b["part_o"][part])
            assert np.array_equal(expected, attn[row, head]), (row, head)
    assert untouched(b["attn"][:, 4:])


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
