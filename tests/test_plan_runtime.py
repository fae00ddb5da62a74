"""What tasks find out at run time: chunks, experts, shares; against plain loops."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from mkref.plan import Op, Task
from mkref.plan.runtime import (
    attention_items,
    dense_route,
    find_experts,
    launch_ends,
    segments,
    split_counts,
    stopped_rows,
)
from mkref.plan.share import share
from mkref.reference.sampling import router_scores
from tests.decode import small_config


def items_by_loops(positions: list[int], window: int, heads: int) -> list[tuple[int, ...]]:
    """All fields of each chunk, in the kernel's order, for splits of one chunk."""
    out: list[tuple[int, ...]] = []
    for row, last in enumerate(positions):
        first = last - window + 1 if window and last >= window else 0
        for chunk in range(first // 128, last // 128 + 1):
            pages = [p for p in (2 * chunk, 2 * chunk + 1) if first // 64 <= p <= last // 64]
            for head in range(heads):
                number = chunk - first // 128
                item = (row, head, number, number, 0, first, last, pages[0], pages[-1])
                out.append(item)
    return out


@pytest.mark.parametrize("window", [0, 1, 5, 64, 70, 128, 200])
@pytest.mark.parametrize("n_slots", [1, 3, 50])
def test_attention_items(window: int, n_slots: int) -> None:
    """All slots together have every chunk once, dealt in turn."""
    positions = [0, 63, 64, 127, 128, 300, 69, 70]
    expected = items_by_loops(positions, window, 3)
    for slot in range(n_slots):
        task = Task(Op.ATTENTION, 0, slot, n_slots)
        items = attention_items(np.array(positions), window, 3, task)
        got = list(zip(*(vars(items)[name].tolist() for name in vars(items)), strict=True))
        assert expected[slot::n_slots] == got


@pytest.mark.parametrize("window", [0, 6000])
@pytest.mark.parametrize("n_slots", [1, 3, 50, 132])
def test_long_rows_have_splits_of_several_chunks(n_slots: int, window: int) -> None:
    """At most 33 splits of a KV head, alike but for one chunk, dealt in turn with those of
    short rows; each split in one slot, chunk after chunk.
    """
    positions = [69_000, 200, 140_000, 33 * 128 - 1, 33 * 128, 5]
    n_splits = [33, 2, 33, 33, 33, 1]
    expected: list[list[tuple[int, ...]]] = []
    for row, (last, n) in enumerate(zip(positions, n_splits, strict=True)):
        first = max(0, last - window + 1) if window else 0
        n_chunks = last // 128 - first // 128 + 1
        begins = [split * n_chunks // n for split in range(n + 1)]
        sizes = {after - begin for begin, after in itertools.pairwise(begins)}
        assert max(sizes) - min(sizes) <= 1
        for number, (begin, after) in enumerate(itertools.pairwise(begins)):
            expected += [
                [
                    (row, head, c, number, c - begin, (first // 128 + c) * 2 + 1)
                    for c in range(begin, after)
                ]
                for head in range(3)
            ]
    for slot in range(n_slots):
        task = Task(Op.ATTENTION, 0, slot, n_slots)
        items = attention_items(np.array(positions), window, 3, task)
        last_page = np.maximum(items.last_page, items.last_page // 2 * 2 + 1)  # of a whole chunk
        fields = (items.row, items.head, items.chunk, items.split, items.nth, last_page)
        got = list(zip(*(field.tolist() for field in fields), strict=True))
        assert [chunk for split in expected[slot::n_slots] for chunk in split] == got
    assert n_splits == split_counts(np.array(positions), window).tolist()


def test_every_page_of_an_item_has_a_visible_key() -> None:
    """Otherwise a page's maximum would be -inf and the softmax undefined."""
    rng = np.random.default_rng(0)
    for window in rng.integers(0, 300, 50).tolist():
        positions = rng.integers(0, 1000, 8)
        items = attention_items(positions, window, 1, Task(Op.ATTENTION, 0, 0, 1))
        assert np.all(items.first_page <= items.last_page)
        assert np.all(items.last_page * 64 <= items.last_key)
        assert np.all(items.first_page * 64 + 63 >= items.first_key)
        assert np.all(items.last_page - items.first_page <= 1)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_experts_are_those_of_the_reference(norm_topk_prob: bool) -> None:
    """Same experts and scores as `router_scores`; the union is ascending."""
    config = small_config(norm_topk_prob=norm_topk_prob)
    logits = np.random.default_rng(1).standard_normal((5, 12)).astype(np.float32)
    logits[2] = 0.5  # ties: the lowest ids
    route = find_experts(4, logits, config)
    ids, scores = router_scores(logits, 3, norm_topk_prob)
    assert route.layer == 4
    assert [0, 1, 2] == ids[2].tolist()
    assert np.array_equal(scores, route.scores[ids, np.arange(5)[:, None]])
    assert 5 * 3 == np.count_nonzero(route.scores)
    assert sorted(set(ids.ravel().tolist())) == list(route.experts)
    assert (12, 5) == route.scores.shape


def test_a_nan_loses_against_every_number() -> None:
    """Also against -inf; a row of NaN takes the lowest ids."""
    config = small_config()
    logits = np.full((2, 12), np.nan, dtype=np.float32)
    logits[0, 9:] = -np.inf
    with np.errstate(all="ignore"):
        route = find_experts(0, logits, config)
    assert [9, 10, 11] == np.flatnonzero(route.scores[:, 0]).tolist()
    assert [0, 1, 2] == np.flatnonzero(route.scores[:, 1]).tolist()


def test_a_dense_layer_is_one_expert_with_score_one() -> None:
    """For all rows."""
    route = dense_route(3, 20)
    assert (3, (0,), np.ones((1, 20)).tolist()) == (
        route.layer,
        route.experts,
        route.scores.tolist(),
    )


@pytest.mark.parametrize("n_active", [1, 3, 64])
@pytest.mark.parametrize("n_slots", [1, 4, 7, 132])
@pytest.mark.parametrize("beside", [0, 5, 328])
def test_segments_cover_all_active_experts_once(n_active: int, n_slots: int, beside: int) -> None:
    """In order; with what the slots have of another operator, as even as granules allow."""
    task = Task(Op.GATE_UP, 0, 0, 2 * n_slots, blocks=6, index=beside)
    seen, sizes = [], []
    for slot in range(n_slots):
        begin, end = share(beside, n_slots, slot)
        sizes.append(end - begin if 6 * n_active >= n_slots else 0)
        for half in (2 * slot, 2 * slot + 1):
            for part in segments(replace(task, first=half), n_active):
                sizes[-1] += part.count
                seen += [(part.active, g) for g in range(part.first, part.first + part.count)]
    assert [(a, g) for a in range(n_active) for g in range(6)] == seen
    assert max(sizes) - min(sizes) <= 1


def test_a_row_stops_at_one_of_its_own_ids_and_stays_stopped() -> None:
    """Whatever it makes afterwards; ids below 0 are none, also against a token that is none."""
    stop_ids = np.full((4, 8), -1)
    stop_ids[0, :2], stop_ids[1, 7], stop_ids[2, 0] = [7, 9], 9, 3
    tokens = np.array([[5, 7, 9, 3], [9, 7, 1, -1], [5, 9, 2, 9]])
    assert [0, 1, 2] == [stopped_rows(tokens[: n + 1], stop_ids) for n in range(3)]
    assert 1 == stopped_rows(tokens[:, :1], stop_ids[:1])
    assert 0 == stopped_rows(tokens[:, 2:], stop_ids[2:])


def test_a_launch_ends_when_enough_rows_have_stopped_or_on_request() -> None:
    """`stop_after` 0 never ends it; a wish of the host always does."""
    stop_ids = np.array([[4, -1], [4, 6], [-1, -1]])
    tokens = np.array([[4, 5, 4], [1, 6, 4]])
    for steps, stopped in ((1, 1), (2, 2)):
        part = tokens[:steps]
        ends = [launch_ends(part, stop_ids, n, cancelled=False) for n in (0, 1, 2, 3)]
        assert [False, stopped >= 1, stopped >= 2, False] == ends
        assert all(launch_ends(part, stop_ids, n, cancelled=True) for n in (0, 3))
