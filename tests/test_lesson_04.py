"""Lesson 04: answers that change their argument, arrays of the wrong type, and what sizes hide."""

from __future__ import annotations

import numpy as np
import pytest

from mkref.errors import RequestError
from mkref.lessons.check import exercise
from mkref.lessons.lesson_04 import loads_per_lane, other_bits, tile_order
from mkref.lessons.lesson_04_figures import recorded_ring, tile_figure
from mkref.lessons.lesson_04_finish import COLUMNS, GROUP, OTHER
from mkref.lessons.whole import LESSON_CONFIG
from mkref.weights.layout import PAGE


def test_answer_that_writes_into_its_tile_spoils_nothing() -> None:
    """It is told so every time, and other answers are judged as before."""

    def in_place(tile: np.ndarray) -> np.ndarray:
        tile[:] = np.reshape(tile_order(tile), tile.shape)
        return tile.reshape(-1)

    for _ in range(2):
        results, _ = exercise("04.1").judge(in_place)
        assert all("it changes the tile" in wrong for _, wrong in results)
    assert loads_per_lane(in_place) == 1
    assert loads_per_lane(lambda tile: tile.reshape(-1)) == 4
    results, hint = exercise("04.1").judge(lambda tile: tile.reshape(-1))
    assert all(wrong for _, wrong in results)
    assert hint


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_array_of_floats_is_named(dtype: type) -> None:
    """The shape is right, so the message is about the type."""
    results, _ = exercise("04.1").judge(lambda tile: np.array(tile_order(tile), dtype))
    for _, wrong in results:
        assert f"256 numbers of type {np.dtype(dtype)}, words are uint16" in wrong


def test_sizes_differ_in_one_of_the_models() -> None:
    """What the small model cannot tell apart, the other can."""
    assert LESSON_CONFIG.num_key_value_heads == LESSON_CONFIG.head_dim // 16
    sizes = (
        OTHER.num_key_value_heads, OTHER.head_dim // 16, OTHER.num_attention_heads, COLUMNS, GROUP,
        OTHER.head_dim, OTHER.q_width, OTHER.kv_width,
    )  # fmt: skip
    assert len(set(sizes)) == len(sizes)
    assert OTHER.num_attention_heads == GROUP * OTHER.num_key_value_heads
    assert PAGE != OTHER.kv_width
    assert LESSON_CONFIG.head_dim != OTHER.head_dim


def test_sums_differ_and_their_roundings_hardly() -> None:
    """What the text after prediction 04.b says."""
    differ, far, stored = other_bits()
    assert differ > 240
    assert far < 1e-5
    assert stored < 5


def test_pictures() -> None:
    """A lane that a warp does not have is refused; the ring shows the task before QKV."""
    with pytest.raises(RequestError, match="lanes 0 to 31, not 40"):
        tile_figure(lane=40)
    assert "DOWN" in repr(recorded_ring())
