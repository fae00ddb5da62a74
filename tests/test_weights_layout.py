"""The packed layout: fragment order, exact inverses, and a place for every tensor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from mkref.config import NORTH_MINI_CODE, NorthConfig
from mkref.weights.layout import (
    PackedLayout,
    from_b_order,
    kv_tile,
    n_tiles,
    pack_kv_page,
    pack_tiles,
    to_b_order,
    unpack_kv_page,
    unpack_tiles,
    write_half,
)

SMALL = NorthConfig.from_dict(
    {
        "vocab_size": 90, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 32, "num_experts": 5,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "sliding_window": 8,
        "prefix_dense_intermediate_size": 64, "rms_norm_eps": 1e-6,
        "expert_selection_fn": "sigmoid",
    }
)  # fmt: skip


def words(shape: tuple[int, ...], seed: int = 0) -> npt.NDArray[np.uint16]:
    """Random words, none of them 0."""
    return np.random.default_rng(seed).integers(1, 1 << 16, shape, dtype=np.uint16)


def test_fragment_order() -> None:
    """Lane l holds a0..a3 of mma.sync.m16n8k16, lower k first (PTX ISA, matrix fragments)."""
    matrix = words((32, 48))
    tiles = pack_tiles(matrix)
    for block, k_tile in np.ndindex(2, 3):
        tile = tiles[block * 3 + k_tile].reshape(32, 4, 2)
        for lane in range(32):
            g, t = lane >> 2, lane & 3
            rows = [16 * block + g, 16 * block + g + 8] * 2
            columns = [16 * k_tile + 2 * t + add for add in (0, 0, 8, 8)]
            want = [[matrix[r, k], matrix[r, k + 1]] for r, k in zip(rows, columns, strict=True)]
            assert tile[lane].tolist() == want


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 90])
def test_pack_and_unpack_are_inverse(rows: int) -> None:
    """Any number of rows; padding rows are zero and are dropped again."""
    matrix = words((rows, 64), rows)
    tiles = pack_tiles(matrix)
    assert tiles.shape == (n_tiles(rows, 64), 256)
    assert np.array_equal(matrix, unpack_tiles(tiles, rows, 64))
    padded = unpack_tiles(tiles, -(-rows // 16) * 16, 64)
    assert not padded[rows:].any()


def test_pack_refuses_ragged_columns() -> None:
    """The depth of a product is a multiple of 16."""
    with pytest.raises(ValueError, match="40 columns, must be a multiple of 16"):
        pack_tiles(words((16, 40)))


def test_gate_and_up_interleave_by_eight_rows() -> None:
    """A granule is gate rows 8j..8j+7, then up rows 8j..8j+7; halves do not touch each other."""
    gate, up = words((32, 48), 1), words((32, 48), 2)
    tiles = np.full((n_tiles(64, 48), 256), 0xDEAD, dtype=np.uint16)
    write_half(tiles, up, 1)
    write_half(tiles, gate, 0)
    mixed = np.concatenate([gate.reshape(4, 8, 48), up.reshape(4, 8, 48)], axis=1)
    assert np.array_equal(mixed.reshape(64, 48), unpack_tiles(tiles, 64, 48))


def test_b_order() -> None:
    """Within 16 values 0,1,8,9,2,3,10,11,...: lane l reads b0, b1 of its column at byte 8 l."""
    x = words((8, 48))
    b = to_b_order(x)
    assert b.shape == (3, 8, 16)
    assert np.array_equal(x, from_b_order(b))
    for k_tile in range(3):
        flat = b[k_tile].reshape(32, 4)
        for lane in range(32):
            g, t = lane >> 2, lane & 3
            k = 16 * k_tile + 2 * t
            want = [x[g, k], x[g, k + 1], x[g, k + 8], x[g, k + 9]]
            assert flat[lane].tolist() == want
    single = words((1, 32), 3)
    assert np.array_equal(single, from_b_order(to_b_order(single)))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_kv_page(head_dim: int) -> None:
    """K tiles (rows = keys), then V^T tiles (rows = dims); an exact inverse."""
    keys, values = words((64, head_dim), 1), words((64, head_dim), 2)
    page = pack_kv_page(keys, values)
    assert page.shape == (head_dim // 2, 256)
    got_keys, got_values = unpack_kv_page(page, head_dim)
    assert np.array_equal(keys, got_keys)
    assert np.array_equal(values, got_values)
    dims = head_dim // 16
    # key tile 2, dim tile 1, then dim tile 1, key tile 2
    assert np.array_equal(unpack_tiles(page[2 * dims + 1 :], 16, 16), keys[32:48, 16:32])
    assert np.array_equal(unpack_tiles(page[4 * dims + 4 + 2 :], 16, 16), values[32:48, 16:32].T)


def test_kv_tile() -> None:
    """base + (page * Hkv + head) * D / 2."""
    assert kv_tile(1000, 3, 2, NORTH_MINI_CODE) == 1000 + (3 * 4 + 2) * 64


@pytest.mark.parametrize("config", [SMALL, NORTH_MINI_CODE], ids=["small", "north"])
def test_regions_follow_one_another(config: NorthConfig) -> None:
    """Router, qkv, gate_up, o, down of every layer, then the head: no gap, no overlap."""
    layout = PackedLayout(config)
    tile = 0
    for i in range(config.num_hidden_layers):
        at = layout.layer(i)
        hidden = config.hidden_size // 16
        if config.is_dense(i):
            assert at.router == -1
        else:
            assert at.router == tile
            tile += -(-config.num_experts // 16) * hidden
        assert at.qkv == tile
        tile += (config.q_width + 2 * config.kv_width) // 16 * hidden
        assert at.gate_up == tile
        width = config.mlp_width(i) // 16
        assert layout.gate_up_stride(i) == 2 * width * hidden
        tile += layout.n_experts(i) * 2 * width * hidden
        assert at.o == tile
        tile += hidden * config.q_width // 16
        assert at.down == tile
        assert layout.down_stride(i) == width * hidden
        tile += layout.n_experts(i) * width * hidden
    assert layout.head == tile
    assert layout.total_tiles == tile + -(-config.vocab_size // 16) * hidden


def test_north_is_packed_without_waste() -> None:
    """18,730 tensors; every parameter once, gammas apart."""
    layout = PackedLayout(NORTH_MINI_CODE)
    places = list(layout.placements())
    assert len(places) == 18_730
    assert len({p.name for p in places}) == 18_730
    assert layout.total_tiles * 256 + 50 * 2048 == NORTH_MINI_CODE.n_parameters()


def test_placements_cover_the_array_once() -> None:
    """Writing every tensor where its placement says fills every tile, each word once."""
    layout = PackedLayout(SMALL)
    count = np.zeros((layout.total_tiles, 256), dtype=np.uint16)
    gammas = np.zeros(SMALL.num_hidden_layers + 1, dtype=int)
    for p in layout.placements():
        ones = np.ones((p.rows, p.cols), dtype=np.uint16)
        region = slice(p.tile, p.tile + p.n_tiles)
        if p.gamma:
            gammas[p.tile] += 1
            assert p.shape == (48,)
        elif p.half is None:
            count[region] += pack_tiles(ones)
        else:
            part = np.zeros_like(count[region])
            write_half(part, ones, p.half)
            count[region] += part
    assert np.all(gammas == 1)
    padding = (16 - 5) * 48 * 2 + (96 - 90) * 48  # router rows of two layers, vocabulary rows
    assert int((count == 0).sum()) == padding
    assert count.max() == 1
