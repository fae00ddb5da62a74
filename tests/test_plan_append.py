"""Keys and values of this step: where attention finds them, and who appends them to their page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mkref.plan import Flag, Op, Task
from mkref.plan.interpret_attention import attention, merge
from mkref.reference.scalars import from_bf16, to_bf16
from mkref.weights.layout import from_b_order, pack_kv_page, to_b_order
from tests.desk import POSITIONS, Desk
from tests.pages import Cache, Words, set_q


@pytest.mark.parametrize("n_slots", [1, 3, 7, 50])
def test_every_row_and_head_is_appended_by_one_slot(n_slots: int) -> None:
    """Slot count - 1 - (row heads + head) % count: from the end, where MERGE has least to do."""
    desk = Desk()
    set_q(desk)
    cache = Cache(desk, 4)
    c, kv = desk.config, desk.buffers["kv"]
    for slot in range(n_slots):
        attention(desk.step, cache.task(Op.ATTENTION, 4, slot, n_slots))
    owners: dict[tuple[int, int], list[int]] = {}
    before = kv.copy()
    for slot in range(n_slots):
        kv[...] = before
        merge(desk.step, cache.task(Op.MERGE, 4, slot, n_slots))
        for row, position in enumerate(POSITIONS):
            for head in range(c.num_key_value_heads):
                at = cache.tiles(desk, row, position // 64, head)
                if not np.array_equal(before[at], kv[at]):
                    owners.setdefault((row, head), []).append(slot)
    expected = {
        (row, head): [n_slots - 1 - (row * c.num_key_value_heads + head) % n_slots]
        for row in range(desk.rows)
        for head in range(c.num_key_value_heads)
    }
    assert expected == owners


class Tokens:
    """Tokens of some sequences, with random q, k, v of one layer; what came before is in pages.

    Args:
        layer: sliding or full.
        first: position of every sequence's first token here.
        earlier: per token, how many of its sequence come before it.
    """

    def __init__(self, layer: int, first: int, earlier: list[int]) -> None:
        self.layer, self.first, self.earlier = layer, first, np.array(earlier)
        self.sequence = np.cumsum(self.earlier == 0) - 1
        c, n, rng = Desk(1).config, len(earlier), np.random.default_rng(6)
        self.q = to_bf16(rng.standard_normal((n, c.num_key_value_heads, c.group_size, c.head_dim)))
        self.new = to_bf16(rng.standard_normal((2, n, c.num_key_value_heads, c.head_dim)))
        shape = (self.sequence[-1] + 1, 6, 2, c.num_key_value_heads, 64, c.head_dim)
        history = rng.standard_normal(shape)
        # [sequence, page, k or v, head, 64, D]: NaN from the first token of this step on
        keys = np.arange(6)[:, None, None, None] * 64 + np.arange(64)
        self.history = to_bf16(np.where(keys[..., None] < first, history, np.nan))

    def desk(self, rows: int) -> tuple[Desk, Task]:
        """Poisoned buffers with the pages of all sequences, and the task of the only SM."""
        desk = Desk(rows)
        c, b, base = desk.config, desk.buffers, desk.plan.pool.base(desk.config, self.layer)
        pages = self.history.reshape(-1, *self.history.shape[2:])
        for page, head in np.ndindex(len(pages), c.num_key_value_heads):
            tiles = pack_kv_page(*pages[page, :, head])
            at = base + (page * c.num_key_value_heads + head) * len(tiles)
            b["kv"][at : at + len(tiles)] = tiles
        flags, window = (Flag.SLIDING, c.sliding_window) if c.is_sliding(self.layer) else (0, 0)
        task = Task(
            Op.ATTENTION, self.layer, 0, 1, flags=flags, window=window, kv_tiles=base
        )  # MERGE has the same words
        return desk, task

    def attend(self, desk: Desk, task: Task, tokens: list[int]) -> Words:
        """Feed some tokens, one per row: their attention, uint16 [rows, q width]."""
        c, b = desk.config, desk.buffers
        for row, token in enumerate(tokens):
            b["positions"][row] = self.first + self.earlier[token]
            b["earlier"][row] = self.earlier[token] if len(tokens) > 1 else 0
            b["page_table"][:, row] = np.arange(6) + 6 * self.sequence[token]
            b["k_new"][row], b["v_new"][row] = self.new[:, token]
            for head in range(c.num_key_value_heads):
                b["q"][row, head, :, : c.group_size] = to_b_order(self.q[token, head])
        attention(desk.step, task)
        merge(desk.step, task)
        return from_b_order(b["attn"][:, : len(tokens)].copy())


@pytest.mark.parametrize(
    ("first", "earlier"),
    [
        (61, [0, 1, 2, 3, 4]),  # over the end of a page
        (126, [0, 1, 2, 3, 4]),  # and of a chunk
        (199, [0, 1, 2, 3, 4]),
        (0, [0, 1, 2, 3, 4]),
        (190, [0, 1, 0, 1, 2]),  # two sequences of two and three tokens
    ],
)
@pytest.mark.parametrize("layer", [1, 4])
def test_rows_that_are_tokens_of_one_sequence(layer: int, first: int, earlier: list[int]) -> None:
    """All at once or one step after the other: the same bits of output and cache.

    At once, the keys of the earlier tokens come from their rows; their place in the page is NaN.
    """
    tokens, every = Tokens(layer, first, earlier), list(range(len(earlier)))
    at_once, one_by_one = tokens.desk(len(every)), tokens.desk(1)
    together = tokens.attend(*at_once, every)
    alone = np.concatenate([tokens.attend(*one_by_one, [token]) for token in every])
    assert np.isfinite(from_bf16(alone)).all()
    assert np.array_equal(alone, together)
    assert one_by_one[0].buffers["kv"].tobytes() == at_once[0].buffers["kv"].tobytes()


def test_a_window_of_one_key_does_not_see_the_row_before() -> None:
    """Visibility is by position also among the rows of a step: the output is the row's own v."""
    tokens = Tokens(1, 70, [0, 1, 2, 3, 4])
    desk, task = tokens.desk(5)
    attn = tokens.attend(desk, replace(task, window=1), list(range(5)))
    heads = attn.reshape(5, 2, -1, desk.config.head_dim)
    assert (heads == tokens.new[1][:, :, None]).all()
